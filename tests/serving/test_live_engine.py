"""The server over the real engine, on a tiny checkpoint."""

import dataclasses
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import running
from test_images import MODEL, data_url, picture

from ds41jax.engine.engine import Engine
from ds41jax.engine.loading import Model

BENCH = Path(__file__).parents[2] / "bench" / "serving_soak.py"


def _bench() -> Any:
    spec = importlib.util.spec_from_file_location("serving_soak", BENCH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["serving_soak"] = module
    spec.loader.exec_module(module)
    return module


bench = _bench()


@pytest.fixture(scope="module")
def engine(text_model: Model) -> Iterator[Engine]:
    options = dataclasses.replace(bench.OPTIONS, max_active=2, max_queue=2, dspark=False)
    with Engine(text_model, options) as engine:
        yield engine


def test_soak(engine: Engine) -> None:
    """A short one; the long one is `bench/serving_soak.py`."""
    tally, stats = bench.soak(engine, bench.requests()[:6], clients=8, seconds=8)
    assert bench.faults(tally, stats) == []
    assert tally.left


def test_turns_are_reused(engine: Engine) -> None:
    """B024: each turn of a conversation finds the one before it in the cache."""
    with running(engine) as url, httpx.Client(base_url=url, timeout=300) as client:
        messages, hits = [{"role": "user", "content": "word " * 40}], []
        for _ in range(3):
            fields = {"model": MODEL, "max_tokens": 4, "temperature": 0, "reasoning_effort": "none"}
            answer = client.post(
                "/v1/chat/completions", json={**fields, "messages": messages}
            ).json()
            usage = answer["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
            hits.append(usage["prompt_cache_hit_tokens"])
            messages += [
                {"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
                {"role": "user", "content": "go on"},
            ]
        assert hits[0] < hits[1] < hits[2]


def test_images(engine: Engine) -> None:
    """B030, B031: a repeated image is found in the cache, another one is seen, order matters."""
    with running(engine) as url, httpx.Client(base_url=url, timeout=300) as client:

        def ask(*colours: str) -> tuple[int, int, list[float]]:
            images = [
                {"type": "image_url", "image_url": data_url(picture(colour=c))} for c in colours
            ]
            messages = [{"role": "user", "content": [{"type": "text", "text": "x"}, *images]}]
            fields = {"model": MODEL, "max_tokens": 3, "temperature": 0, "logprobs": True}
            answer = client.post("/v1/chat/completions", json={**fields, "messages": messages})
            assert answer.status_code == 200, answer.text
            usage, logprobs = answer.json()["usage"], answer.json()["choices"][0]["logprobs"]
            hits = usage["prompt_cache_hit_tokens"]
            values = [entry["logprob"] for entry in logprobs["reasoning_content"]]
            return usage["prompt_tokens"], hits, values

        tokens, hits, red = ask("red")
        assert hits < tokens
        assert ask("red") == (tokens, tokens, red)
        other_tokens, other_hits, blue = ask("blue")
        assert other_tokens == tokens and other_hits < tokens and blue != red
        assert ask("red", "blue")[2] != ask("blue", "red")[2]
        assert client.get("/health").status_code == 200
