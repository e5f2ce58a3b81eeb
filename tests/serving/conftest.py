"""Fixtures of the server's tests."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import deepseek_recipe as recipe
import pytest
import uvicorn

from ds41jax.serving.app import make_app
from ds41jax.serving.lifecycle import DrainingServer
from ds41jax.serving.server import ServerOptions
from ds41jax.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def official() -> Tokenizer:
    """The official vocabulary."""
    return Tokenizer.from_vendor()


@pytest.fixture(scope="session")
def decoder(official: Tokenizer) -> recipe.Tokenizer:
    """The same for deepseek-recipe."""
    return recipe.Tokenizer.from_str(official.to_json().decode())


class ServerThread(threading.Thread):
    """A thread that runs a server."""

    server: DrainingServer


@contextlib.contextmanager
def running(engine: Any, port: int = 0, **options: Any) -> Iterator[str]:
    """A live server on loopback; yields its address."""
    app = make_app(engine, ServerOptions(**{"context": 4096, **options}))
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    config = uvicorn.Config(app, log_level="warning", lifespan="on")
    server = DrainingServer(config, app.state.server, drain_seconds=5)
    thread = ServerThread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.server = server
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
