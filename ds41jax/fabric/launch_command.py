"""`ds41jax launch`: a whole deployment from one file."""

import argparse
from pathlib import Path

from ds41jax.fabric.deployment import read_deployment
from ds41jax.fabric.launch import launch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("config", metavar="CONFIG", type=Path, help="TOML; see configs/")
    parser.add_argument("--dry-run", action="store_true", help="check every host, start nothing")


def run(args: argparse.Namespace) -> int:
    """Runs until the server ends or a signal comes."""
    return launch(read_deployment(args.config), args.dry_run)
