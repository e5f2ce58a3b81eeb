"""Many clients against a live server on a tiny checkpoint: every answer must be the right one.

Each request of a fixed set is first answered alone. Then clients send requests of the set at
random, streamed or not, and leave some of them in the middle; every answer that is read to its end
must equal the one given alone, and at the end nothing may be left in the queue or in the pages.

    python bench/serving_soak.py --seconds 180
"""

import argparse
import asyncio
import json
import random
import socket
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jax
import uvicorn

from ds41jax.cache.radix import Reuse
from ds41jax.cache_folder import cache_folder
from ds41jax.checkpoint.presets import tiny_config
from ds41jax.checkpoint.synthetic import make_checkpoint
from ds41jax.engine.engine import Engine
from ds41jax.engine.loading import load_model
from ds41jax.engine.options import EngineOptions
from ds41jax.serving.app import make_app
from ds41jax.serving.server import ServerOptions

URL = "/v1/chat/completions"
OPTIONS = EngineOptions(
    max_active=4,
    max_queue=4,
    context=1536,
    pool_tokens=16384,
    prefill_chunk=64,
    retained=4,
    reuse=Reuse.EXACT,  # a bounded hit may change an answer, as documented
    warm_up=False,
)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"type": "string", "enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}


def requests() -> list[dict[str, Any]]:
    """The set: greedy and seeded, free and constrained."""
    out = []
    for n in range(4):
        messages = [{"role": "user", "content": "word " * (7 * n) + f"question {n}"}]
        base = {"model": "DeepSeek-V4.1-Flash", "messages": messages, "reasoning_effort": "none"}
        out.append({**base, "temperature": 0, "max_tokens": 12 + 5 * n})
        out.append({**base, "temperature": 1, "seed": n, "max_tokens": 30, "stop": ["e", "qq"]})
        pattern = {"type": "regex", "regex": "[ab]{3,9}c"}
        out.append({**base, "seed": n, "max_tokens": 20, "response_format": pattern})
    tools = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200, "temperature": 0}
    out.append({**out[0], **tools})
    out.append({**out[0], "reasoning_effort": "high", "max_tokens": 20})
    return out


@dataclass
class Tally:
    """What has come of the requests."""

    answers: int = 0
    left: int = 0
    refused: int = 0
    wrong: list[Any] = field(default_factory=list)


async def _answer(client: httpx.AsyncClient, body: dict[str, Any]) -> Any:
    """(reasoning, content, calls, why it ended, tokens); None if the server is full."""
    answer = await client.post(URL, json=body)
    if answer.status_code == 429:
        return None
    if answer.status_code != 200:
        raise RuntimeError(answer.text)
    data = answer.json()
    choice = data["choices"][0]
    message = choice["message"]
    calls = [
        (c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])
    ]
    texts = message.get("reasoning_content") or "", message["content"] or ""
    return (*texts, calls, choice["finish_reason"], data["usage"]["completion_tokens"])


async def _streamed(client: httpx.AsyncClient, body: dict[str, Any], leave: int | None) -> Any:
    """The same from a stream; None if full, and False if left after so many lines."""
    reasoning, content, ended, tokens = "", "", None, 0
    calls: list[list[str]] = []
    fields = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", URL, json=fields) as answer:
        if answer.status_code == 429:
            return None
        if answer.status_code != 200:
            raise RuntimeError((await answer.aread()).decode())
        lines = 0
        async for line in answer.aiter_lines():
            lines += 1
            if leave is not None and lines > leave:
                return False
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
            for choice in chunk["choices"]:
                delta = choice["delta"]
                reasoning += delta.get("reasoning_content", "")
                content += delta.get("content", "")
                ended = choice["finish_reason"] or ended
                for call in delta.get("tool_calls", []):
                    if "id" in call:
                        calls.append([call["function"]["name"], ""])
                    calls[call["index"]][1] += call["function"]["arguments"]
    return reasoning, content, [tuple(call) for call in calls], ended, tokens


async def _client(
    client: httpx.AsyncClient,
    bodies: list[dict[str, Any]],
    known: list[Any],
    end: float,
    tally: Tally,
    generator: random.Random,
) -> None:
    while time.monotonic() < end:
        at = generator.randrange(len(bodies))
        kind = generator.random()
        if kind < 0.15:
            with_limit = _answer(client, bodies[at])
            try:
                answer = await asyncio.wait_for(with_limit, generator.uniform(0.01, 0.3))
            except TimeoutError:
                answer = False
        elif kind < 0.6:
            answer = await _answer(client, bodies[at])
        else:
            leave = generator.randint(1, 8) if generator.random() < 0.4 else None
            answer = await _streamed(client, bodies[at], leave)
        if answer is None:
            tally.refused += 1
            await asyncio.sleep(0.1)
        elif answer is False:
            tally.left += 1
        else:
            tally.answers += 1
            if answer != known[at]:
                tally.wrong.append((bodies[at], answer, known[at]))


async def _all(
    url: str, bodies: list[dict[str, Any]], clients: int, seconds: float
) -> tuple[Tally, dict[str, Any]]:
    limits = httpx.Limits(max_connections=2 * clients)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        known = [await _answer(client, body) for body in bodies]
        tally, end = Tally(), time.monotonic() + seconds
        generators = map(random.Random, range(clients))
        await asyncio.gather(
            *(_client(client, bodies, known, end, tally, each) for each in generators)
        )
        for _ in range(200):
            stats: dict[str, Any] = (await client.get("/v1/stats")).json()
            if not stats["engine"]["active"] and not stats["http_active"]:
                break
            await asyncio.sleep(0.05)
        return tally, stats


def soak(
    engine: Engine, bodies: list[dict[str, Any]], clients: int, seconds: float
) -> tuple[Tally, dict[str, Any]]:
    """Serves the engine on loopback and lets the clients loose; their tally and `/v1/stats`."""
    app = make_app(engine, ServerOptions(context=OPTIONS.context, queue_wait_seconds=5))
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        return asyncio.run(_all(url, bodies, clients, seconds))
    finally:
        server.should_exit = True
        thread.join(10)


def faults(tally: Tally, stats: dict[str, Any]) -> list[str]:
    """What is wrong; empty if all is well."""
    engine, cache = stats["engine"], stats["engine"]["cache"]
    found = [f"{body}: {got} instead of {wanted}" for body, got, wanted in tally.wrong]
    if engine["active"] or engine["waiting"] or stats["http_active"] or stats["http_queue_len"]:
        found.append("requests are left")
    if engine["free_pages"] + cache["evictable_pages"] != engine["pool_pages"]:
        found.append(f"pages are left: {engine['free_pages']}, {cache['evictable_pages']}")
    if not tally.answers:
        found.append("nothing was answered")
    return found


def main() -> int:
    """Prints one JSON line; exit code 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny"
        make_checkpoint(path, tiny_config(), seed=0, progress=False)
        with Engine(load_model(path, progress=False), OPTIONS) as engine:
            tally, stats = soak(engine, requests(), args.clients, args.seconds)
    found = faults(tally, stats)
    counts = {"answers": tally.answers, "left": tally.left, "refused": tally.refused}
    totals = {"seconds": args.seconds, "clients": args.clients, "engine": stats["engine"]["totals"]}
    result = {**counts, "wrong": len(tally.wrong), "faults": found[:5], **totals}
    print(json.dumps(result))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
