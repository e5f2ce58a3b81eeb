"""The console: its WebSocket, and its page in a browser."""

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from conftest import running
from fake_engine import FakeEngine, script_of
from test_openai import MODEL, USER
from test_stress import until
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from ds41jax.serving.activity import MAX_EVENTS, Activity, Watched
from ds41jax.serving.console import send_frames
from ds41jax.serving.server import Server, ServerOptions
from ds41jax.tokenizer import Tokenizer

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
BODY: dict[str, Any] = {"model": MODEL, "messages": USER}


@pytest.fixture
def engine(official: Tokenizer) -> FakeEngine:
    return FakeEngine(official, script_of(official, "secret words " * 20, delay=0.02))


def frames(viewer: ClientConnection, seconds: float) -> Iterator[dict[str, Any]]:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        try:
            yield json.loads(viewer.recv(timeout=left))
        except TimeoutError:
            return


def ask(url: str, **headers: str) -> threading.Thread:
    def post() -> None:
        httpx.post(f"{url}/v1/chat/completions", json=BODY, headers=headers, timeout=60)

    thread = threading.Thread(target=post)
    thread.start()
    return thread


@pytest.mark.parametrize("with_text", [False, True])
def test_stream(engine: FakeEngine, with_text: bool) -> None:
    """A snapshot, then at most 20 frames a second; what is written only if the server says so."""
    with running(engine, console_text=with_text) as url:
        with connect(url.replace("http", "ws") + "/v1/console") as viewer:
            asking = ask(url)
            got = list(frames(viewer, 2.0))
            asking.join()
        assert httpx.get(f"{url}/v1/console/snapshot").json()["type"] == "snapshot"
    assert got[0]["type"] == "snapshot" and got[0]["text"] == with_text
    assert all(frame["type"] == "frame" for frame in got[1:]) and len(got) <= 42
    kinds = [event["k"] for frame in got[1:] for event in frame.get("ev", [])]
    assert [k for k in kinds if k not in ("round", "prefill")] == [
        "admit", "start", "first", "retire",
    ]  # fmt: skip
    assert kinds.count("prefill") == 1 and kinds.count("round") == 42
    steps = [e for frame in got[1:] for e in frame.get("ev", []) if e["k"] in ("round", "prefill")]
    assert steps[0]["done"] == steps[0]["total"] > 0 and steps[0]["ms"]["wait"] == 4.0
    (one,) = steps[1]["req"]
    assert (one["drafted"], one["verified"], one["accepted"], one["emitted"]) == (3, 2, 0, 1)
    assert ("text" in one) == with_text and engine.observer is None
    active = [r for frame in got[1:] for r in frame.get("active", [])]
    assert active and active[-1]["gen"] > active[0]["gen"]
    assert ("secret" in json.dumps(got)) == with_text


def test_key_and_origin(engine: FakeEngine) -> None:
    with running(engine, api_key="key") as url:
        address = url.replace("http", "ws") + "/v1/console"
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            with (
                pytest.raises((InvalidStatus, ConnectionClosed)),
                connect(address, additional_headers=headers) as viewer,
            ):
                viewer.recv(timeout=5)
        right = {"Authorization": "Bearer key"}
        with connect(address, additional_headers=right) as viewer:
            assert json.loads(viewer.recv(timeout=5))["type"] == "snapshot"
        with (
            pytest.raises((InvalidStatus, ConnectionClosed)),
            connect(address, additional_headers=right, origin="http://evil.example") as viewer,
        ):
            viewer.recv(timeout=5)


def test_nobody_looks() -> None:
    """The engine is observed from the first viewer's coming to the last one's leaving."""
    observers: list[Any] = []
    activity = Activity(False, observers.append)
    activity.admit(Watched(id="1", route="/", prompt=1))
    assert observers == []
    first, second = activity.watch(), activity.watch()
    activity.retire(activity.active["1"], "stop")
    for viewer in (first, second):
        events = viewer.take()
        assert events is not None and [event["k"] for event in events] == ["retire"]
    activity.unwatch(first)
    assert observers == [activity]
    activity.unwatch(second)
    assert observers == [activity, None]


def test_slow_viewer_starts_afresh(engine: FakeEngine) -> None:
    """What does not fit into a viewer's queue is not sent in part: a snapshot takes its place."""
    server = Server(engine, ServerOptions())
    viewer = server.activity.watch()
    sent: list[dict[str, Any]] = []
    room = asyncio.Event()

    async def send(text: str) -> None:
        sent.append(json.loads(text))
        await room.wait()

    async def run() -> None:
        task = asyncio.create_task(send_frames(send, server, viewer))
        await asyncio.sleep(0.1)  # it is stuck with the first snapshot
        for n in range(MAX_EVENTS + 10):
            server.activity.admit(Watched(id=str(n), route="/", prompt=1))
            server.activity.retire(server.activity.active[str(n)], "stop")
        server.activity.admit(Watched(id="last", route="/", prompt=1))
        room.set()
        await asyncio.sleep(0.2)
        task.cancel()

    asyncio.run(run())
    assert [message["type"] for message in sent[:2]] == ["snapshot", "snapshot"]
    assert [request["id"] for request in sent[1]["requests"]] == ["last"]
    assert all("ev" not in message for message in sent[2:])


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_page_in_a_browser(engine: FakeEngine, width: int, scheme: str) -> None:
    """The page fits, its counters move, nothing is loaded from elsewhere, and it reconnects."""
    from playwright.sync_api import sync_playwright

    faults: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("requestfailed", lambda request: faults.append(request.url))
        outside: list[str] = []
        with running(engine) as url:
            page.on("request", lambda r: outside.append(r.url) if url not in r.url else None)
            page.goto(url)
            page.wait_for_selector("#link.up")
            asking = ask(url)
            page.wait_for_selector("#active .bar")
            until(lambda: page.inner_text(".tile b")[0] in "123456789")
            page.wait_for_selector("#active .request canvas")
            until(lambda: "1 requests, 3 rows" in page.inner_text("#rounds-note"))
            assert "8.00 ms" in page.inner_text("#times")
            asking.join()
            page.wait_for_selector("#recent td")
            assert "stop" in page.inner_text("#recent")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert [u for u in outside if not u.startswith(("data:", "ws:"))] == []
            assert faults == []
            port = int(url.rpartition(":")[2])
        page.wait_for_selector("#link:not(.up)")
        with running(engine, port=port):
            page.wait_for_selector("#link.up", timeout=20_000)
        browser.close()
