"""The console: its WebSocket, and its page in a browser."""

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
    assert kinds == ["admit", "start", "first", "retire"]
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
    """No events are kept without a viewer, and a viewer that falls behind keeps a bounded queue."""
    activity = Activity(with_text=False)
    activity.admit(Watched(id="1", route="/", prompt=1))
    events = activity.watch()
    for n in range(MAX_EVENTS + 10):
        activity.admit(Watched(id=str(n), route="/", prompt=1))
    assert len(events) == MAX_EVENTS
    activity.unwatch(events)
    assert activity.viewers == 0


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
