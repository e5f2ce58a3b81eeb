"""The arguments of `ds41jax qualify` and what it prints."""

import argparse
import json
import sys
from pathlib import Path

from ds41jax.cache.radix import Reuse
from ds41jax.engine.engine import Engine
from ds41jax.engine.generate import resolve_model
from ds41jax.engine.options import MAX_ACTIVE, EngineOptions
from ds41jax.qualify import FACT_LENGTHS, Question, Report, answer_limit, qualify, questions
from ds41jax.tokenizer import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("--model", metavar="DIR", help="checkpoint; the default one if left out")
    parser.add_argument("--count", type=int, default=16, metavar="N", help="questions of each kind")
    parser.add_argument("--concurrency", type=int, default=MAX_ACTIVE, metavar="N")
    parser.add_argument("--no-dspark", action="store_true", help="without drafts: same answers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="counts and wrong replies")
    parser.add_argument(
        "--require", type=float, metavar="RATE", help="exit code 1 if any check is below"
    )


def run(args: argparse.Namespace) -> int:
    """Asks, prints the table, and writes the file if one is wanted."""
    if args.count < 1:
        raise ValueError(f"--count must be at least 1, not {args.count}")
    model = resolve_model(args.model)
    if model.tokenizer is None:
        raise ValueError(f"{model.path} has no tokenizer.json: nothing can be asked")
    asked = questions(model.tokenizer, args.count)
    context = needed_context(model.tokenizer, asked)
    options = EngineOptions(
        max_active=args.concurrency,
        context=context,
        pool_tokens=args.concurrency * context,
        dspark=not args.no_dspark,
        reuse=Reuse.OFF,
        warm_up=False,
    )
    with Engine(model, options) as engine:
        report = qualify(engine, asked, context, args.concurrency)
        totals = engine.stats().totals
    print(report.table())
    if totals["drafted"]:
        share = totals["accepted"] / totals["drafted"]
        print(f"{totals['accepted']} of {totals['drafted']} drafts accepted ({share:.0%})")
    if args.json is not None:
        data = {"model": str(model.path), "count": args.count, **report.json()}
        args.json.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return _verdict(report, args.require)


def needed_context(tokenizer: Tokenizer, asked: list[Question]) -> int:
    """Tokens of the longest question and its answer."""
    answers = max(answer_limit(tokenizer, question.example) for question in asked)
    return max(FACT_LENGTHS) + answers


def _verdict(report: Report, required: float | None) -> int:
    if required is None:
        return 0
    below = [name for name, *_ in report.rows() if report.rate(name) < required]
    if below:
        print(f"below {required:.0%}: {', '.join(below)}", file=sys.stderr)
    return 1 if below else 0
