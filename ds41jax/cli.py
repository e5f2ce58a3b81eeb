"""The `ds41jax` command."""

import argparse
import sys
from pathlib import Path

import jax

from ds41jax import compute_arguments, plan_command, qualify_command
from ds41jax.cache_folder import cache_folder
from ds41jax.card_arguments import (
    add_card_arguments,
    add_host_arguments,
    join_hosts,
    split_parts,
)
from ds41jax.checkpoint import make_command
from ds41jax.compute_arguments import compute_of, described
from ds41jax.engine.generate import GenerateOptions, Progress, stream_text
from ds41jax.engine.loading import load_model
from ds41jax.engine.sampling import SamplingParams
from ds41jax.engine.score import score_file
from ds41jax.fabric import launch_command, worker_command
from ds41jax.fabric.library import FabricError
from ds41jax.serving import arguments, clients_command

COMPILED_SECONDS = 0.5  # programs that compile faster are not worth a file


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; what the user can mend is one message on stderr and exit code 1."""
    args = _parser().parse_args(arguments)
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", COMPILED_SECONDS)
    try:
        code: int = args.run(args)
        return code
    except (ValueError, OSError, FabricError) as error:
        print(f"ds41jax {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ds41jax", description="DeepSeek-V4.1-Flash in JAX")
    commands = parser.add_subparsers(dest="command", required=True)
    generate = commands.add_parser("generate", help="stream text that answers a prompt")
    _add_generate_arguments(generate)
    score = commands.add_parser("score", help="evaluate given token sequences")
    _add_score_arguments(score)
    make = commands.add_parser("make-checkpoint", help="write a checkpoint with random weights")
    make_command.add_arguments(make)
    make.set_defaults(run=make_command.run)
    plan = commands.add_parser("plan", help="what would lie where in device memory")
    plan_command.add_arguments(plan)
    plan.set_defaults(run=plan_command.run)
    serve = commands.add_parser(  # no abbreviations, which a later option could make ambiguous
        "serve", help="serve the OpenAI, Anthropic and Responses APIs", allow_abbrev=False
    )
    arguments.add_arguments(serve)
    serve.set_defaults(run=_serve)
    qualify = commands.add_parser("qualify", help="examine a model on questions with one answer")
    qualify_command.add_arguments(qualify)
    qualify.set_defaults(run=qualify_command.run)
    worker = commands.add_parser("worker", help="serve routed experts to a coordinator")
    worker_command.add_arguments(worker)
    worker.set_defaults(run=worker_command.run)
    launch = commands.add_parser("launch", help="start a coordinator and its workers from a file")
    launch_command.add_arguments(launch)
    launch.set_defaults(run=launch_command.run)
    clients = commands.add_parser("clients", help="print configuration for the usual clients")
    clients_command.add_arguments(clients)
    clients.set_defaults(run=clients_command.run)
    return parser


def _serve(args: argparse.Namespace) -> int:
    from ds41jax.serving import command  # the other commands need no web framework

    return command.run(args)


def _add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="answered as a user's turn, unless --raw")
    parser.add_argument("--model", metavar="DIR", help="checkpoint; the nano model if left out")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="0: all")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--no-dspark", action="store_true", help="without drafts: same output")
    parser.add_argument("--prefill", choices=("bounded", "exact"), default="bounded")
    compute_arguments.add_arguments(parser)
    parser.add_argument("--raw", action="store_true", help="continue the text as it stands")
    add_card_arguments(parser)
    add_host_arguments(parser)
    parser.set_defaults(run=_generate)


def _generate(args: argparse.Namespace) -> int:
    speaks = join_hosts(args)
    sampling = SamplingParams(args.temperature, args.top_p, args.top_k, args.min_p, args.seed)
    options = GenerateOptions(
        max_tokens=args.max_tokens,
        sampling=sampling,
        dspark=not args.no_dspark,
        bounded=args.prefill == "bounded",
        raw=args.raw,
        compute=compute_of(args),
        cards=args.cards,
        split=split_parts(args),
    )
    print(described(options.compute), file=sys.stderr)
    progress = Progress()
    for piece in stream_text(args.prompt, args.model, options, progress):
        if speaks:  # other hosts compute the same, and say nothing
            print(piece, end="", flush=True)
    if speaks:
        print()
        print(summary(progress), file=sys.stderr)
    return 0


def summary(progress: Progress) -> str:
    """One line on what a generation did."""
    p = progress
    rate = (p.tokens - 1) / p.decode_seconds if p.decode_seconds else 0.0
    line = (
        f"{p.prompt_tokens} prompt tokens in {p.prefill_seconds:.1f} s, {p.tokens} tokens in "
        f"{p.decode_seconds:.1f} s ({rate:.1f} tokens/s, compilation included)"
    )
    if p.drafted:
        line += f"; {p.accepted} of {p.drafted} drafts accepted"
    return line


def _add_score_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", required=True)
    parser.add_argument("--input", metavar="IN.json", required=True, type=Path)
    parser.add_argument("--output", metavar="OUT.safetensors", required=True, type=Path)
    compute_arguments.add_arguments(parser)
    parser.add_argument("--prefill", choices=("exact", "bounded"), default="exact")
    parser.set_defaults(run=_score)


def _score(args: argparse.Namespace) -> int:
    compute = compute_of(args)
    model = load_model(args.model)
    print(described(compute), file=sys.stderr)
    bounded = args.prefill == "bounded"
    score_file(model, args.input, args.output, compute, bounded=bounded, progress=True)
    return 0
