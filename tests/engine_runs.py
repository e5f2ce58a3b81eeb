"""What the engine tests share: small engines of one size, so that programs compile once."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
from oracle import tiny_model

from ds41jax.cache.radix import Reuse
from ds41jax.engine.core import EngineCore
from ds41jax.engine.generate import GenerateOptions, generate
from ds41jax.engine.options import EngineOptions
from ds41jax.engine.request import Event, Failed, Finished, Request, Token
from ds41jax.engine.sampling import SamplingParams
from ds41jax.engine.sequence import Sequence

# Whatever changes the size of the caches compiles every program anew: tests vary the rest.
OPTIONS = EngineOptions(
    max_active=4,
    max_queue=8,
    context=4096,
    pool_tokens=3072,
    prefill_chunk=64,
    retained=4,
    reuse=Reuse.EXACT,
    warm_up=False,
)


def options(**changes: Any) -> EngineOptions:
    return dataclasses.replace(OPTIONS, **changes)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    """Random tokens of the tiny vocabulary that are neither special nor the image token."""
    return tuple(np.random.default_rng(seed).integers(10, 500, length).tolist())


def request(
    ids: Iterable[int], max_tokens: int = 8, seed: int | None = None, **more: Any
) -> Request:
    """Greedy without a seed, else sampled."""
    sampling = SamplingParams()
    if seed is not None:
        sampling = SamplingParams(temperature=0.8, top_p=0.95, top_k=40, seed=seed)
    return Request(tuple(ids), max_tokens, sampling=sampling, **more)


class Run:
    """A core with the events of each request that was handed to it."""

    def __init__(self, core: EngineCore | None = None, **changes: Any):
        self.core = core or EngineCore(tiny_model(), options(**changes))
        self.events: list[list[Event]] = []
        self.sequences: list[Sequence] = []

    def add(self, request: Request) -> int:
        """Hands a request in; returns its number in this run."""
        events: list[Event] = []
        sequence = self.core.preparer.sequence(request, events.append)
        self.core.add(sequence)
        self.events.append(events)
        self.sequences.append(sequence)
        return len(self.events) - 1

    def finish(self) -> "Run":
        """Runs until nothing is left, and balances the books."""
        while self.core.step():
            pass
        assert self.core.idle
        self.core.check()
        return self

    def all(self, requests: Iterable[Request]) -> list[list[int]]:
        """Tokens of requests that run together."""
        numbers = [self.add(r) for r in requests]
        self.finish()
        return [self.tokens(n) for n in numbers]

    def tokens(self, number: int) -> list[int]:
        return [e.token_id for e in self.events[number] if isinstance(e, Token)]

    def last(self, number: int) -> Finished | Failed:
        last = self.events[number][-1]
        assert isinstance(last, Finished | Failed)
        return last


@functools.cache
def alone(request: Request, bounded: bool = True) -> list[int]:
    """The tokens of the single-sequence loop, without drafts: what an engine must give."""
    made = GenerateOptions(
        max_tokens=request.max_tokens, sampling=request.sampling, dspark=False, bounded=bounded
    )
    return generate(request.token_ids, tiny_model(), made).token_ids
