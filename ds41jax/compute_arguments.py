"""The options that choose rounding and kernels, the same for every command that runs a model."""

import argparse

import jax

from ds41jax.formats import Numerics
from ds41jax.kernels.compute import Compute, Kernels, default_kernels

AUTO = "auto"


def add_arguments(group: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declares `--kernels` and `--numerics`."""
    group.add_argument(
        "--kernels",
        choices=(AUTO, *(kernels.value for kernels in Kernels)),
        default=AUTO,
        help="auto: pallas on an NVIDIA GPU, jnp elsewhere; interpret, very slow, is for tests",
    )
    group.add_argument(
        "--numerics",
        choices=tuple(numerics.value for numerics in Numerics),
        default=Numerics.REFERENCE.value,
        help="float32 switches every activation and cache quantiser off; jnp only",
    )


def compute_of(args: argparse.Namespace) -> Compute:
    """What the arguments choose; raises `ValueError` where they contradict each other."""
    numerics = Numerics(args.numerics)
    if args.kernels == AUTO:
        return Compute(numerics, default_kernels(numerics))
    return Compute(numerics, Kernels(args.kernels))


def described(compute: Compute) -> str:
    """What is printed about the choice."""
    device = jax.devices()[0].device_kind
    return f"{compute.kernels.value} kernels, {compute.numerics.value} numerics, on {device}"
