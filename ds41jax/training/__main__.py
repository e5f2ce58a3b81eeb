"""`python -m ds41jax.training`: makes the nano model from its data, in one command that resumes."""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import jax
import numpy as np

from ds41jax.checkpoint.presets import nano_config
from ds41jax.config import parse_config
from ds41jax.model.engram_hash import EngramHash, compressed_token_map
from ds41jax.tokenizer import FILE_NAME as TOKENIZER_FILE
from ds41jax.tokenizer import Tokenizer
from ds41jax.training.ablation import ABLATIONS, ablated
from ds41jax.training.batches import Rows
from ds41jax.training.evaluate import both_bits, quantised_bits
from ds41jax.training.export import export_checkpoint
from ds41jax.training.recipe import Recipe, nano_phases, smoke_phases
from ds41jax.training.run import Data, DrafterTraining, OutOfTime, Run, train_target


def main() -> int:
    """Trains, evaluates and exports; exit code 3 means: out of time, run the same again."""
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_checkpoint(args.tokenizer)
    config_json = ablated(nano_config(tokenizer), args.without)
    config = parse_config(config_json)
    hash_ = None
    if config.engram_layer_ids:
        hash_ = EngramHash.from_config(config, compressed_token_map(tokenizer))
    recipe = _recipe(args)
    data = Data(short=_rows(args.data, "short"), long=_rows(args.data, "long"))
    deadline = time.monotonic() + args.seconds
    run = Run(recipe, config, hash_, data, args.out, deadline, args.start)
    run.log(
        {"recipe": recipe.to_json(), "device": jax.devices()[0].device_kind, "jax": jax.__version__}
    )
    try:
        drafter = None if args.without or args.target_only else DrafterTraining(run)
        masters = train_target(run)
        if drafter is not None:
            masters = drafter.train(masters)
    except OutOfTime as stop:
        print(f"{stop}; run the same command again to go on", file=sys.stderr)
        return 3
    if not args.without:
        export_checkpoint(args.out / "checkpoint", masters, config_json, tokenizer)
    if args.evaluate:
        heldout = _rows(args.data, "heldout_short")
        measure = quantised_bits if args.target_only else both_bits
        bits = measure(masters, heldout, tokenizer, config, hash_, run.compute)
        run.log({"bits_per_byte": bits, "without": args.without})
        print(json.dumps(bits))
    return 0


def _rows(folder: Path, name: str) -> Rows:
    return Rows(
        tokens=np.load(folder / f"{name}_tokens.npy", mmap_mode="r"),
        weights=np.load(folder / f"{name}_weights.npy", mmap_mode="r"),
    )


def _recipe(args: argparse.Namespace) -> Recipe:
    if args.smoke:
        return Recipe(seed=args.seed, phases=smoke_phases(), drafter_steps=2, drafter_rows=2)
    recipe = Recipe(seed=args.seed, phases=nano_phases(args.scale))
    return dataclasses.replace(recipe, drafter_steps=int(recipe.drafter_steps * args.scale))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ds41jax.training", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="made by ds41jax.training.data")
    parser.add_argument(
        "--tokenizer", type=Path, default=Path("ds41jax/nano"), help=f"folder of {TOKENIZER_FILE}"
    )
    parser.add_argument("--out", type=Path, required=True, help="state, log and checkpoint")
    parser.add_argument(
        "--start", type=Path, metavar="DIR", help="checkpoint to train on from, instead of nothing"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="of all numbers of steps")
    parser.add_argument("--seconds", type=float, default=1e9, help="save and stop after this long")
    parser.add_argument(
        "--target-only", action="store_true", help="no drafter, no unquantised bits"
    )
    parser.add_argument(
        "--evaluate", action=argparse.BooleanOptionalAction, default=True, help="held-out bits"
    )
    parser.add_argument("--smoke", action="store_true", help="a few small steps of every kind")
    parser.add_argument("--without", choices=ABLATIONS, help="trains without one mechanism")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
