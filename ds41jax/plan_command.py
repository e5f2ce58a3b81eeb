"""`ds41jax plan`: what would lie where in device memory, before anything is loaded."""

import argparse
import re
from pathlib import Path

from ds41jax.cache.planner import PlanOptions, plan_memory
from ds41jax.config import load_config

_UNITS = {"": 1, "MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("config", metavar="CONFIG", help="config.json or the folder that holds it")
    parser.add_argument(
        "--device",
        metavar="BYTES",
        action="append",
        required=True,
        type=size_in_bytes,
        help="memory of a card, such as 96GiB; twice for two cards",
    )
    parser.add_argument("--active", type=int, default=16, metavar="N", help="requests at once")
    parser.add_argument("--retained", type=int, default=20, metavar="N", help="snapshots a bank")
    parser.add_argument("--context", type=int, default=1 << 20, metavar="TOKENS")
    parser.add_argument(
        "--local-experts",
        metavar="N|auto",
        default="auto",
        type=_layers,
        help="layers whose routed experts lie here; the rest needs workers",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the plan; a request that does not fit says by how much."""
    options = PlanOptions(
        context=args.context,
        slots=args.active,
        retained=args.retained,
        routed_layers=args.local_experts,
    )
    print(plan_memory(load_config(Path(args.config)), args.device, options).table())
    return 0


def size_in_bytes(text: str) -> int:
    """Bytes of a size such as 96GiB, 80GB or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size like 96GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _layers(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a number of layers")
    return int(text)
