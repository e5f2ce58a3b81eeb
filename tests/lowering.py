"""Lowering a kernel for a GPU that is not there."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

DEVICES = {
    "NVIDIA H200": 132,
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": 188,
    "NVIDIA GB10": 48,
}


def lower_for_gpu(function: Callable[..., Any], *args: Any, device: str) -> str:
    """The module's text with every kernel of `function` lowered to Triton IR for the device."""
    with _device(device):
        traced = jax.jit(function).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def _device(device: str) -> contextlib.AbstractContextManager[Any]:
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()  # lowers for sm_90, and knows no other device
    from jax.sharding import AbstractDevice

    abstract = AbstractDevice(device_kind=device, num_cores=DEVICES[device], platform="cuda")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=abstract)
    return jax.sharding.use_abstract_mesh(mesh)
