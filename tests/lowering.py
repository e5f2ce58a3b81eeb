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


def lower_for_gpu(
    function: Callable[..., Any], *args: Any, device: str, mesh: AbstractMesh | None = None
) -> str:
    """The module's text with every kernel of `function` lowered to Triton IR for the device.

    `mesh`: of `gpu_mesh`, for a function over several devices.
    """
    with _device(mesh or gpu_mesh(1, "x", device)):
        traced = jax.jit(function).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def gpu_mesh(count: int, axis: str, device: str) -> AbstractMesh:
    """A mesh of GPUs that are not there."""
    auto = (AxisType.Auto,)
    if jax.__version_info__ < (0, 11):
        return AbstractMesh((count,), (axis,), axis_types=auto)
    from jax.sharding import AbstractDevice

    abstract = AbstractDevice(device_kind=device, num_cores=DEVICES[device], platform="cuda")
    return AbstractMesh((count,), (axis,), axis_types=auto, abstract_device=abstract)


def _device(mesh: AbstractMesh) -> contextlib.AbstractContextManager[Any]:
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()  # lowers for sm_90, and knows no other device
    return jax.sharding.use_abstract_mesh(mesh)
