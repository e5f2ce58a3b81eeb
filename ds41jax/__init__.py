"""ds41jax: DeepSeek-V4.1-Flash inference as pure JAX functions."""

from importlib.metadata import version

from ds41jax.engine.engine import Engine
from ds41jax.engine.generate import GenerateOptions, Generation, generate, stream_text
from ds41jax.engine.loading import Model, load_model
from ds41jax.engine.options import EngineOptions
from ds41jax.engine.request import Request
from ds41jax.engine.sampling import SamplingParams

__version__ = version("ds41jax")

__all__ = [
    "Engine",
    "EngineOptions",
    "GenerateOptions",
    "Generation",
    "Model",
    "Request",
    "SamplingParams",
    "generate",
    "load_model",
    "stream_text",
]
