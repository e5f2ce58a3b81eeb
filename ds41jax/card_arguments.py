"""Arguments that several commands share: over which cards, and over which hosts, a model lies."""

import argparse
from pathlib import Path
from typing import Any

from ds41jax.engine.hosts import read_hosts
from ds41jax.kernels.cards import Part

MOST_CARDS = 64


def add_card_arguments(parser: Any) -> None:
    """Declares --cards and --split on a parser or a group of one."""
    parts = [part.value for part in Part]
    parser.add_argument(
        "--cards", type=_cards, default=1, metavar="N", help="GPUs that hold the model together"
    )
    parser.add_argument(
        "--split",
        action="append",
        choices=parts,
        help="what they share, again for more than one; everything if left out",
    )


def add_host_arguments(parser: Any) -> None:
    """Declares --hosts and --host."""
    parser.add_argument(
        "--hosts", type=Path, metavar="FILE", help="run as one of several hosts (TOML)"
    )
    parser.add_argument("--host", type=int, default=0, metavar="I", help="which of them this is")


def split_parts(args: argparse.Namespace) -> frozenset[Part]:
    """What --split names, or everything."""
    return frozenset(map(Part, args.split or Part))


def join_hosts(args: argparse.Namespace) -> bool:
    """Meets the other hosts, if a file names some, and takes cards and split from it.

    Returns:
      Whether this host speaks for all.

    Raises:
      ValueError, OSError: saying what is wrong.
    """
    if args.hosts is None:
        return True
    if args.cards != 1 or args.split:
        raise ValueError(f"--cards and --split stand in {args.hosts}: leave them out")
    deployment = read_hosts(args.hosts)
    deployment.join(args.host)
    args.cards, args.split = deployment.cards, [part.value for part in deployment.split]
    return bool(args.host == 0)


def _cards(text: str) -> int:
    count = int(text)
    if not 1 <= count <= MOST_CARDS:
        raise argparse.ArgumentTypeError(f"{count} is not from 1 to {MOST_CARDS}")
    return count
