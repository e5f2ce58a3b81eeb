"""Clients that go away, engines that fail, servers that are full, closed or locked."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from conftest import ServerThread, running
from fake_engine import FakeEngine, Script, script_of
from test_openai import CALL, MODEL, USER, WEATHER

from ds41jax.engine.request import EngineError
from ds41jax.tokenizer import Tokenizer

BODY: dict[str, Any] = {"model": MODEL, "messages": USER}
LONG = "word " * 200


def until(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


@contextlib.contextmanager
def raw_post(url: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A plain socket that has sent a request."""
    data = json.dumps(body).encode()
    parts = urlsplit(url)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    assert parts.port is not None
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.sendall(head.encode() + data)
        yield connection


@pytest.mark.parametrize("stream", [True, False])
def test_client_goes_away(official: Tokenizer, stream: bool) -> None:
    engine = FakeEngine(official, script_of(official, LONG, delay=0.02))
    with running(engine) as url:
        with raw_post(url, {**BODY, "stream": stream}) as connection:
            until(lambda: engine.open)
            if stream:
                assert b"200 OK" in connection.recv(4096)
        until(lambda: engine.cancelled)
        assert httpx.get(f"{url}/v1/stats").json()["http_active"] == 0


def test_reset_connection_hurts_nobody_else(official: Tokenizer) -> None:
    """B079: a hard close in the middle of a stream; the other stream goes on to its end."""
    engine = FakeEngine(official, script_of(official, "word " * 30, delay=0.01))
    with running(engine) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        other = client.chat.completions.create(model=MODEL, messages=USER, stream=True)
        with raw_post(url, {**BODY, "stream": True}) as connection:
            connection.recv(1024)
            linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        assert list(other)[-1].choices[0].finish_reason == "stop"
        until(lambda: len(engine.cancelled) == 1 and not engine.open)


def test_waiting_client_goes_away(official: Tokenizer) -> None:
    engine = FakeEngine(official, script_of(official, LONG, delay=0.02), capacity=1)
    with running(engine) as url, raw_post(url, BODY):
        until(lambda: engine.open)
        waits = lambda: httpx.get(f"{url}/v1/stats").json()["http_queue_len"]  # noqa: E731
        with raw_post(url, BODY):
            until(lambda: waits() == 1)
        until(lambda: waits() == 0)
        assert len(engine.requests) == 1


def test_full(official: Tokenizer) -> None:
    engine = FakeEngine(official, script_of(official, LONG, delay=0.02), capacity=1)
    with running(engine, queue_wait_seconds=0.2, queue_depth=1) as url, raw_post(url, BODY):
        until(lambda: engine.open)
        answer = httpx.post(f"{url}/v1/chat/completions", json={**BODY, "stream": True})
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "queue_full"


def test_waiter_gets_the_next_place(official: Tokenizer) -> None:
    engine = FakeEngine(official, script_of(official, "word " * 10, delay=0.01), capacity=1)
    with running(engine) as url:
        statuses: list[int] = []

        def ask() -> None:
            statuses.append(httpx.post(f"{url}/v1/chat/completions", json=BODY).status_code)

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert statuses == [200] * 6


def failing(tokenizer: Tokenizer, text: str, error: EngineError) -> Script:
    return lambda request: [*tokenizer.encode_special(text), error]


@pytest.mark.parametrize(
    ("kind", "status"),
    [("invalid", 400), ("capacity", 400), ("draining", 503), ("closed", 503), ("internal", 500)],
)
def test_engine_refuses(official: Tokenizer, kind: str, status: int) -> None:
    engine = FakeEngine(official, script_of(official, "x"))
    with running(engine) as url:
        for stream in (False, True):
            engine.refusal = EngineError(kind, "/secret/path is broken")
            answer = httpx.post(f"{url}/v1/chat/completions", json={**BODY, "stream": stream})
            assert answer.status_code == status
            assert kind != "internal" or "secret" not in answer.text


def test_engine_fails_in_a_stream(official: Tokenizer) -> None:
    """B099: the client sees an error, never a made-up finish and never [DONE]."""
    error = EngineError("internal", "/secret/path is broken")
    engine = FakeEngine(official, failing(official, "thought</think>Hel", error))
    with running(engine) as url:
        text = httpx.post(f"{url}/v1/chat/completions", json={**BODY, "stream": True}).text
        assert "[DONE]" not in text and "secret" not in text
        assert '"finish_reason":"' not in text and '"error"' in text
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        with pytest.raises(openai.APIError):
            list(client.chat.completions.create(model=MODEL, messages=USER, stream=True))
        assert httpx.post(f"{url}/v1/chat/completions", json=BODY).status_code == 500
        events = httpx.post(f"{url}/v1/messages", json={**BODY, "stream": True}).text
        assert "event: error" in events and "message_stop" not in events
        events = httpx.post(
            f"{url}/v1/responses", json={"model": MODEL, "input": "x", "stream": True}
        ).text
        assert "event: error" in events and "response.completed" not in events


def test_dead_engine(official: Tokenizer) -> None:
    engine = FakeEngine(official, script_of(official, "x"))
    with running(engine) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        engine.healthy = False
        assert httpx.get(f"{url}/health").status_code == 503


def test_key_on_every_route(official: Tokenizer) -> None:
    """B084, B085: deny by default; only the health check is open."""
    engine = FakeEngine(official, script_of(official, "x"))
    with running(engine, api_key="secret") as url:
        paths = httpx.get(f"{url}/openapi.json", auth=("any", "secret")).json()["paths"]
        assert len(paths) == 15
        for path, methods in paths.items():
            for method in methods:
                answer = httpx.request(method, f"{url}{path}", json=BODY)
                assert answer.status_code == (200 if path == "/health" else 401), path
                wrong = {"Authorization": "Bearer secreu"}
                answer = httpx.request(method, f"{url}{path}", json=BODY, headers=wrong)
                assert answer.status_code == (200 if path == "/health" else 401), path
        assert httpx.get(f"{url}/").headers["www-authenticate"].startswith("Basic")
        for headers in ({"Authorization": "Bearer secret"}, {"x-api-key": "secret"}):
            assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200


def test_draining(official: Tokenizer) -> None:
    engine = FakeEngine(official, script_of(official, "word " * 30, delay=0.02))
    with running(engine) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        stream = client.chat.completions.create(model=MODEL, messages=USER, stream=True)
        next(iter(stream))
        thread = next(t for t in threading.enumerate() if isinstance(t, ServerThread))
        thread.server.begin_drain()
        answer = httpx.post(f"{url}/v1/chat/completions", json=BODY)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert httpx.get(f"{url}/health").status_code == 503
        assert list(stream)[-1].choices[0].finish_reason == "stop"
        thread.join(5)
        assert not thread.is_alive()


def test_without_the_grammar_library(official: Tokenizer) -> None:
    """Tools that are offered work; what only a grammar can promise is refused."""
    engine = FakeEngine(official, script_of(official, f"thought</think>{CALL}"))
    with running(engine, guided=False) as url, httpx.Client(base_url=url) as client:
        path, body = "/v1/chat/completions", {**BODY, "tools": [WEATHER]}
        assert client.post(path, json=body).status_code == 200
        assert engine.requests[-1].constraint is None
        for more in (
            {"tool_choice": "required"},
            {"parallel_tool_calls": False},
            {"response_format": {"type": "regex", "regex": "a"}},
        ):
            answer = client.post(path, json={**body, **more})
            assert answer.status_code == 400 and "xgrammar" in answer.text


def test_interleaved_streams_keep_apart(official: Tokenizer) -> None:
    """B013: the parser's state belongs to the request."""
    engine = FakeEngine(official, script_of(official, f"thought</think>{CALL}", delay=0.001))
    with running(engine) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        fields: dict[str, Any] = {"model": MODEL, "messages": USER, "tools": [WEATHER]}
        streams = [client.chat.completions.create(**fields, stream=True) for _ in range(4)]
        texts = [""] * 4
        for chunks in zip(*streams, strict=True):
            for n, chunk in enumerate(chunks):
                for call in chunk.choices[0].delta.tool_calls or []:
                    texts[n] += call.function.arguments or ""
        assert len(set(texts)) == 1
        assert json.loads(texts[0]) == {"city": "Paris 🌊", "days": [1, 2]}
