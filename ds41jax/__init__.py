"""ds41jax: DeepSeek-V4.1-Flash inference as pure JAX functions.

What this module offers is imported when it is first asked for: a part of the package, kernels or
training, then runs without what only serving needs.
"""

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds41jax.engine.engine import Engine
    from ds41jax.engine.generate import GenerateOptions, Generation, generate, stream_text
    from ds41jax.engine.loading import Model, load_model
    from ds41jax.engine.options import EngineOptions
    from ds41jax.engine.outputs import Output
    from ds41jax.engine.request import EngineError, Failed, Finished, Request, Started, Token
    from ds41jax.engine.sampling import SamplingParams

    __version__: str

_HOMES = {
    "Engine": "engine",
    "EngineError": "request",
    "EngineOptions": "options",
    "Failed": "request",
    "Finished": "request",
    "GenerateOptions": "generate",
    "Generation": "generate",
    "Model": "loading",
    "Output": "outputs",
    "Request": "request",
    "SamplingParams": "sampling",
    "Started": "request",
    "Token": "request",
    "generate": "generate",
    "load_model": "loading",
    "stream_text": "generate",
}

__all__ = [
    "Engine",
    "EngineError",
    "EngineOptions",
    "Failed",
    "Finished",
    "GenerateOptions",
    "Generation",
    "Model",
    "Output",
    "Request",
    "SamplingParams",
    "Started",
    "Token",
    "generate",
    "load_model",
    "stream_text",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("ds41jax")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"ds41jax.engine.{_HOMES[name]}"), name)
