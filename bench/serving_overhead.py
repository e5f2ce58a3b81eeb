"""What the HTTP layer adds to the engine's own time, at a given concurrency.

An engine without a model emits a token for each running request every few milliseconds and notes
when; clients in another process note when each token's frame arrives on their socket. Both read the
machine's monotonic clock, so the difference is the layer's delay: parsing, framing, two event loops
and the loopback. The engine's own handles are the real ones, and after each round its thread keeps
the interpreter busy for as long as the real one's host work does.

All clients ask at the same moment, so the time before the engine is that of a burst.

    python bench/serving_overhead.py --concurrency 1 16 --tokens 200 --each 1 4
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from ds41jax.checkpoint.presets import small_config
from ds41jax.config import ModelConfig, parse_config
from ds41jax.engine.engine import RequestHandle
from ds41jax.engine.request import Finished, Request, Started, Token
from ds41jax.serving.app import make_app
from ds41jax.serving.command import SWITCH_SECONDS
from ds41jax.serving.server import ServerOptions
from ds41jax.tokenizer import Tokenizer

MODEL = "DeepSeek-V4.1-Flash"


@dataclass
class StubModel:
    """What the server reads of a model."""

    config: ModelConfig
    tokenizer: Tokenizer
    path: str = ""


class StubEngine:
    """Emits `each` tokens of every request at the same moment, as a decode round does."""

    healthy = True

    def __init__(self, tokens: int, each: int, round_seconds: float, busy_seconds: float):
        self.model = StubModel(parse_config(small_config()), Tokenizer.from_vendor())
        self.emitted: deque[tuple[float, list[float]]] = deque()
        self._word = self.model.tokenizer.encode(" word")[0]
        self._tokens, self._each = tokens, each
        self._round, self._busy = round_seconds, busy_seconds
        self._lock = threading.Lock()
        self._running: list[tuple[RequestHandle, float, list[float]]] = []
        self._count = 0
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, request: Request) -> RequestHandle:
        """Starts at once."""
        self._count += 1
        handle = RequestHandle(self._count, lambda: None)
        handle.put(Started(len(request.token_ids), 0))
        with self._lock:
            self._running.append((handle, time.monotonic(), []))
        return handle

    def _run(self) -> None:
        while True:
            time.sleep(self._round)
            with self._lock:
                running, self._running = self._running, []
                for handle, submitted, times in running:
                    for _ in range(min(self._each, self._tokens - len(times))):
                        times.append(time.monotonic())
                        handle.put(Token(self._word))
                    if len(times) < self._tokens:
                        self._running.append((handle, submitted, times))
                    else:
                        handle.put(Finished("length", 0, self._tokens, 0, 0, 0))
                        self.emitted.append((submitted, times))
            end = time.monotonic() + self._busy
            while time.monotonic() < end and running:
                pass

    def stats(self) -> Any:
        """Nothing to tell."""
        return argparse.Namespace()

    def observe(self, observer: Any) -> None:
        """No steps to tell of."""


async def _client(
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], number: int
) -> tuple[float, list[float]]:
    """(when the request was sent, when each frame with text arrived)."""
    reader, writer = connection
    fields = {"model": MODEL, "stream": True, "reasoning_effort": "none", "max_tokens": 4000}
    messages = [{"role": "user", "content": f"client {number}"}]
    body = json.dumps({**fields, "messages": messages}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    sent = time.monotonic()
    writer.write(head.encode() + body)
    arrived = []
    while True:
        line = await reader.readline()
        if b'"delta":{"content"' in line:
            arrived += [time.monotonic()] * line.count(b" word")
        if not line or line.startswith(b"data: [DONE]"):
            await reader.readuntil(b"0\r\n\r\n")  # the end of the body: the connection is kept
            return sent, arrived


def _clients(port: int, concurrency: int, results: Any) -> None:
    async def all_of_them() -> list[tuple[float, list[float]]]:
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(concurrency)]
        for _ in range(2):  # the first time warms up
            received = await asyncio.gather(*(_client(c, n) for n, c in enumerate(opened)))
        return received

    results.put(asyncio.run(all_of_them()))


def measure(
    concurrency: int, tokens: int, each: int, round_seconds: float, busy_seconds: float
) -> dict[str, float]:
    """Milliseconds from a token's emission to its arrival, and from a request to the engine."""
    sys.setswitchinterval(SWITCH_SECONDS)
    engine = StubEngine(tokens, each, round_seconds, busy_seconds)
    app = make_app(engine, ServerOptions(context=8192))  # type: ignore[arg-type]
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    port = listener.getsockname()[1]
    process = context.Process(target=_clients, args=(port, concurrency, results))
    process.start()
    received = results.get(timeout=300)
    process.join()
    server.should_exit = True
    delays, firsts = [], []
    emitted = sorted(list(engine.emitted)[-concurrency:], key=lambda e: e[1][0])
    received.sort(key=lambda r: r[1][0])
    for (sent, arrived), (submitted, times) in zip(received, emitted, strict=True):
        delays += [1000 * (a - e) for a, e in zip(arrived, times, strict=True)]
        firsts.append(1000 * (submitted - sent))
    delays.sort()
    return {
        "concurrency": concurrency,
        "tokens_a_round": each,
        "tokens": len(delays),
        "token_ms_median": statistics.median(delays),
        "token_ms_p99": delays[int(0.99 * len(delays))],
        "token_ms_longest": delays[-1],
        "before_engine_ms_median": statistics.median(firsts),
        "before_engine_ms_longest": max(firsts),
    }


def main() -> None:
    """Prints one JSON line for each measurement, and writes them all if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--each", type=int, nargs="+", default=[1, 4], help="tokens a round")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--round-ms", type=float, default=20.0)
    parser.add_argument("--busy-ms", type=float, default=1.0, help="host work after each round")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = []
    for _ in range(args.repeats):
        for concurrency in args.concurrency:
            for each in args.each:
                times = args.round_ms / 1000, args.busy_ms / 1000
                found = measure(concurrency, args.tokens, each, *times)
                load = {"load_average": os.getloadavg()[0]}
                results.append({k: round(v, 3) for k, v in (found | load).items()})
                print(json.dumps(results[-1]), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
