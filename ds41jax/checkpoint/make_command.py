"""`ds41jax make-checkpoint`: writes a random checkpoint of a preset's or a model's geometry."""

import argparse
import sys
from pathlib import Path
from typing import Any

from ds41jax.checkpoint.presets import PRESETS, slice_config
from ds41jax.checkpoint.synthetic import make_checkpoint
from ds41jax.config import MAX_CONFIG_BYTES, parse_config, read_json_object


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("out", metavar="OUT", help="folder to make; must not exist")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--preset", choices=sorted(PRESETS), default="small")
    source.add_argument("--config", metavar="FILE", help="config.json of the geometry to write")
    parser.add_argument(
        "--layers",
        type=_layer_numbers,
        metavar="2,20",
        help="only these layers, renumbered, without drafter and vision; Engram tables shrink",
    )
    parser.add_argument("--experts", type=int, metavar="N", help="routed experts per layer")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    """Writes the checkpoint; returns the process's exit code.

    What the user can mend (`ValueError`, `OSError`) is one line or list on stderr and code 1.
    """
    try:
        make_checkpoint(args.out, _config_json(args), args.seed)
    except (ValueError, OSError) as error:
        print(f"ds41jax make-checkpoint: {error}", file=sys.stderr)
        return 1
    print(args.out)
    return 0


def _config_json(args: argparse.Namespace) -> dict[str, Any]:
    if args.config is None:
        config = PRESETS[args.preset]()
    else:
        config = read_json_object(Path(args.config), MAX_CONFIG_BYTES)
    if args.layers is None and args.experts is None:
        return config
    if args.layers is not None:
        return slice_config(config, args.layers, args.experts)
    model = parse_config(config)
    return slice_config(
        config,
        range(model.num_hidden_layers),
        args.experts,
        draft_stages=model.num_nextn_predict_layers,
        vision=model.vision is not None,
        engram_buckets=model.engram_vocab_size,
    )


def _layer_numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected numbers like 2,20, got {text!r}") from error
