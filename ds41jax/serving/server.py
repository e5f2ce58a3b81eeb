"""What the routes share: the engine, the options, what is going on."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import deepseek_recipe as recipe

import ds41jax
from ds41jax.config import ModelConfig
from ds41jax.engine.observer import Observer
from ds41jax.engine.request import Event, Request
from ds41jax.serving.activity import Activity
from ds41jax.serving.gate import Gate
from ds41jax.serving.settings import SamplingDefaults
from ds41jax.tokenizer import Tokenizer

MODEL_NAME = "deepseek-ai/DeepSeek-V4.1-Flash"
NANO_NAME = "ds41jax-nano"
ALIASES = ("DeepSeek-V4.1-Flash", "deepseek-v4.1-flash")
MAX_OUTPUT_TOKENS = 393_216
MAX_DECODERS = 4  # images that are decoded at once


class Handle(Protocol):
    """A request in the engine, as `ds41jax.engine.engine.RequestHandle`."""

    id: str

    @property
    def ready(self) -> bool: ...

    def cancel(self) -> None: ...

    def __aiter__(self) -> AsyncIterator[Event]: ...


class LoadedModel(Protocol):
    """The part of a loaded model that the server reads."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...


class Engine(Protocol):
    """The engine's face, as `ds41jax.engine.engine.Engine` has it."""

    @property
    def model(self) -> LoadedModel: ...

    @property
    def healthy(self) -> bool: ...

    def submit(self, request: Request) -> Handle: ...

    def stats(self) -> Any: ...

    def observe(self, observer: Observer | None) -> None: ...


@dataclass(frozen=True)
class ServerOptions:
    """How requests are served.

    Attributes:
      model_name: the id under which the model is served; `aliases` are accepted too.
      context: tokens of a prompt and its answer together.
      max_output_tokens: the most that a request may ask for.
      sampling: what holds where a request says nothing.
      queue_depth: requests that may wait for a place in the engine's queue.
      queue_wait_seconds: how long one may wait; 0 refuses at once.
      api_key: None for a server open to everyone who reaches it.
      private_urls: images may be fetched from addresses that are not public.
      console_text: the console shows prompts and answers.
      speculative: named in the fingerprint.
      guided: the grammar library is there; without it nothing can be constrained.
    """

    model_name: str = MODEL_NAME
    aliases: tuple[str, ...] = ALIASES
    context: int = 1_048_576
    max_output_tokens: int = MAX_OUTPUT_TOKENS
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    queue_depth: int = 16
    queue_wait_seconds: float = 25.0
    api_key: str | None = None
    private_urls: bool = False
    console_text: bool = False
    speculative: bool = False
    guided: bool = True


class Server:
    """State of a running server."""

    def __init__(self, engine: Engine, options: ServerOptions):
        """Raises `ValueError` if the model has no tokenizer."""
        tokenizer = engine.model.tokenizer
        if tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer.json: without one nothing is served")
        self.engine = engine
        self.options = options
        self.tokenizer = tokenizer
        self.decoder = recipe.Tokenizer.from_str(tokenizer.to_json().decode())
        self.gate = Gate(engine.submit, options.queue_depth, options.queue_wait_seconds)
        self.decoders = asyncio.Semaphore(MAX_DECODERS)
        self.activity = Activity(options.console_text, engine.observe)
        self.started = time.time()
        self.draining = False
        # What the answers are made with; the version is looked up on disk, so not for each of them.
        suffix = "-dspark" if options.speculative else ""
        self.fingerprint = f"ds41jax-{ds41jax.__version__}{suffix}"

    @property
    def config(self) -> ModelConfig:
        """The model's numbers."""
        return self.engine.model.config
