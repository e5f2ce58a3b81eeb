"""Tile sizes of the kernels: data per generation of devices, in choices.toml beside this file.

Kernels ask for `current()` while they are traced. A generation is named by its compute capability
("sm_90"); what is lowered for a device that is not there takes the default.
"""

import contextlib
import contextvars
import functools
import tomllib
from collections.abc import Iterator, Mapping
from importlib import resources
from types import MappingProxyType

import jax

Sizes = Mapping[str, int]
Choices = Mapping[str, Sizes]

DEFAULT = "default"
_tried: contextvars.ContextVar[Choices | None] = contextvars.ContextVar("tried", default=None)


def current() -> Choices:
    """Sizes of every kernel for the device that JAX runs on, or those being tried."""
    return _tried.get() or of_generation(generation())


@functools.cache
def generation() -> str:
    """ "sm_90" and the like; the default's name where JAX runs on no NVIDIA GPU."""
    capability = getattr(jax.devices()[0], "compute_capability", None)
    return f"sm_{capability.replace('.', '')}" if capability else DEFAULT


@functools.cache
def of_generation(name: str) -> Choices:
    """The default with a generation's own numbers, if it has any."""
    text = resources.files(__package__).joinpath("choices.toml").read_text()
    table = tomllib.loads(text)
    own = table.get(name, {})
    return {
        kernel: MappingProxyType(sizes | own.get(kernel, {}))
        for kernel, sizes in table[DEFAULT].items()
    }


@contextlib.contextmanager
def trying(kernel: str, **sizes: int) -> Iterator[None]:
    """What is traced inside takes these numbers for one kernel. For tuning and its tests.

    A jitted function that was traced before keeps what it has.
    """
    choices = dict(current())
    token = _tried.set(choices | {kernel: MappingProxyType(dict(choices[kernel]) | sizes)})
    try:
        yield
    finally:
        _tried.reset(token)
