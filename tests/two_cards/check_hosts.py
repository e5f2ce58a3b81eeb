"""Two hosts with a card each: real processes that meet over the network.

Run by `tests/test_two_cards.py`, whose process has the two devices that the hosts' answer is
compared with.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from ds41jax.checkpoint.presets import tiny_config
from ds41jax.checkpoint.synthetic import make_checkpoint
from ds41jax.cli import main
from ds41jax.engine.hosts import Hosts

MAIN = [sys.executable, "-c", "from ds41jax.cli import main; raise SystemExit(main())"]
ASKED = ["generate", "why?", "--max-tokens", "12", "--temperature", "0.7", "--seed", "3"]
SECONDS = 300


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start(arguments: list[str], cache: Path) -> subprocess.Popen[str]:
    """A process that has one device of its own."""
    kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    env = {**kept, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(cache)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*MAIN, *arguments], env=env, text=True, **pipes)


def test_two_hosts_answer_as_one_with_two_cards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same sums in the same order, so the same bits and words; only host 0 speaks."""
    folder = tmp_path / "tiny"
    make_checkpoint(folder, tiny_config(), seed=0, progress=False)
    asked = [*ASKED, "--model", str(folder), "--cards", "2"]
    meet = ["--join", f"127.0.0.1:{free_port()}", "--hosts", "2", "--host"]
    hosts = [start([*asked, *meet, str(index)], tmp_path) for index in range(2)]
    try:
        said = [host.communicate(timeout=SECONDS) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], said
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "compiled"))
    assert main(asked) == 0
    assert said[0][0] == capsys.readouterr().out
    assert len(said[0][0]) > 1 and said[1][0] == ""


@pytest.mark.parametrize(
    ("address", "count", "index", "what"),
    [
        ("nowhere", 2, 0, "HOST:PORT"),
        ("host:0", 2, 0, "HOST:PORT"),
        ("host:99999", 2, 0, "HOST:PORT"),
        ("host:1234", 1, 0, "at least 2 hosts"),
        ("host:1234", 2, 2, "from 0 to 1"),
    ],
)
def test_hosts_that_cannot_be_are_refused(address: str, count: int, index: int, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Hosts(address, count, index)


def test_fewer_cards_than_hosts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--join", "127.0.0.1:1234", "--cards", "1"]) == 1
    assert "one for each of 2 hosts" in capsys.readouterr().err
