"""Images: taken from data URLs and over HTTP, bounded, and never dropped silently."""

import base64
import http.server
import io
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from conftest import running
from fake_engine import FakeEngine, script_of
from PIL import Image
from test_openai import MODEL

from ds41jax.model.image_processor import plan_image
from ds41jax.serving.fetch import is_public
from ds41jax.serving.images import MAX_IMAGES
from ds41jax.tokenizer import Tokenizer


def picture(kind: str = "PNG", size: tuple[int, int] = (40, 30), colour: str = "red") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, kind)
    return out.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


@pytest.fixture(scope="module")
def engine(official: Tokenizer) -> FakeEngine:
    return FakeEngine(official, script_of(official, "x"))


@pytest.fixture(scope="module")
def client(engine: FakeEngine) -> Iterator[httpx.Client]:
    with running(engine) as url, httpx.Client(base_url=url) as client:
        yield client


def ask(client: httpx.Client, *urls: Any) -> httpx.Response:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [{"type": "text", "text": "What is it?"}, *parts]
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    return client.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_formats(client: httpx.Client, engine: FakeEngine, kind: str) -> None:
    """B088: the prompt grows by exactly the image's tokens; the blank line joins "?" in one."""
    bare = ask(client).json()["usage"]["prompt_tokens"]
    answer = ask(client, data_url(picture(kind), kind.lower()))
    assert answer.status_code == 200, answer.text
    vision = engine.model.config.vision
    assert vision is not None
    plan = plan_image(40, 30, vision)
    assert answer.json()["usage"]["prompt_tokens"] == bare + plan.n_tokens
    span = engine.requests[-1].images[0]
    assert (span.grid_h, span.grid_w) == (plan.n_vit_h, plan.n_vit_w)
    ids = engine.requests[-1].token_ids[span.start : span.start + plan.n_tokens]
    assert set(ids) == {engine.model.config.image_token_id}


def test_sixteen_images_and_identity(client: httpx.Client, engine: FakeEngine) -> None:
    """B030: equal pictures have equal identities, others not."""
    red, blue = data_url(picture()), data_url(picture(colour="blue"))
    urls = [red, blue] * (MAX_IMAGES // 2)
    assert ask(client, *urls).status_code == 200
    assert len(engine.requests[-1].images) == MAX_IMAGES
    assert ask(client, red, blue, red).status_code == 200
    first, second, third = engine.requests[-1].images
    assert first.identity == third.identity != second.identity
    assert first.start < second.start < third.start
    answer = ask(client, *[red] * (MAX_IMAGES + 1))
    assert answer.status_code == 400 and "limit" in answer.json()["error"]["message"]


def test_percent_encoded_and_unpadded(client: httpx.Client) -> None:
    data = picture()
    assert ask(client, data_url(data).rstrip("=")).status_code == 200


def test_messages_image(client: httpx.Client, engine: FakeEngine) -> None:
    source = {"type": "base64", "media_type": "image/png"}
    source["data"] = base64.b64encode(picture()).decode()
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": content}]}
    assert client.post("/v1/messages", json=body).status_code == 200
    assert len(engine.requests[-1].images) == 1


def bomb() -> bytes:
    out = io.BytesIO()
    Image.new("1", (9_000, 9_000)).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,%%%%",
        "data:image/png;base64,AAAA",
        "data:image/svg+xml;base64,AAAA",
        data_url(picture()[:60]),
        data_url(bomb()),
        data_url(picture("BMP"), "png"),
        "http://user:secret@example.com/a.png",
        "http://127.0.0.1:1/a.png",
        "http://[::1]:1/a.png",
        "http://0x7f000001/a.png",
        "http://localhost:1/a.png",
        "http://169.254.169.254/latest",
        "ftp://example.com/a.png",
        "http:///a.png",
        "http://" + "a" * 300 + "/a.png",
        "http://[bad/a.png",
        5,
    ],
)
def test_refused(client: httpx.Client, engine: FakeEngine, url: Any) -> None:
    before = len(engine.requests)
    answer = ask(client, url)
    error = answer.json()["error"]
    assert answer.status_code == 400 and len(engine.requests) == before
    assert "secret" not in error["message"]


class _Pictures(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path.startswith("/redirect"):
            left = int(self.path.rpartition("/")[2])
            self.send_response(302)
            self.send_header("Location", f"/redirect/{left - 1}" if left > 1 else "/a.png")
            self.end_headers()
            return
        found = self.path in ("/a.png", "/endless")
        self.send_response(200 if found else 404)
        self.end_headers()
        if self.path == "/a.png":
            self.wfile.write(picture())
        elif self.path == "/endless":
            piece = bytes(1 << 20)
            for _ in range(40):
                self.wfile.write(piece)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def pictures() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Pictures)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_fetch(official: Tokenizer, client: httpx.Client, pictures: str) -> None:
    answer = ask(client, f"{pictures}/a.png")
    assert answer.status_code == 400 and "not public" in answer.json()["error"]["message"]
    engine = FakeEngine(official, script_of(official, "x"))
    with running(engine, private_urls=True) as url, httpx.Client(base_url=url) as allowed:
        for path, status in [
            ("/a.png", 200),
            ("/redirect/3", 200),
            ("/redirect/4", 400),
            ("/missing", 400),
            ("/endless", 400),
        ]:
            assert ask(allowed, pictures + path).status_code == status, path


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1", True),
        ("10.1.2.3", False),
        ("192.168.1.1", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("fe80::1%eth0", False),
        ("::ffff:127.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("fd00::1", False),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) == public
