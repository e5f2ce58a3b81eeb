"""Arguments that several commands share: over which cards, and over which hosts, a model lies."""

import argparse
from typing import Any

from ds41jax.engine.hosts import Hosts
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
    """Declares --join, --hosts and --host."""
    parser.add_argument(
        "--join", metavar="HOST:PORT", help="run as one of several hosts, which meet there"
    )
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="how many (with --join)")
    parser.add_argument("--host", type=int, default=0, metavar="I", help="which of them this is")


def split_parts(args: argparse.Namespace) -> frozenset[Part]:
    """What --split names, or everything."""
    return frozenset(map(Part, args.split or Part))


def join_hosts(args: argparse.Namespace) -> Hosts | None:
    """Meets the other hosts, if there are any; raises `ValueError` or `OSError`."""
    if args.join is None:
        return None
    hosts = Hosts(args.join, args.hosts, args.host)
    if args.cards < hosts.count:
        raise ValueError(f"--cards {args.cards} is less than one for each of {hosts.count} hosts")
    hosts.join()
    return hosts


def _cards(text: str) -> int:
    count = int(text)
    if not 1 <= count <= MOST_CARDS:
        raise argparse.ArgumentTypeError(f"{count} is not from 1 to {MOST_CARDS}")
    return count
