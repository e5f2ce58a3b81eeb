"""Two hosts with a card each: real processes that meet over the network.

Run by `tests/test_two_cards.py`, whose process has the two devices that the hosts' answer is
compared with.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

from ds41jax.checkpoint.presets import tiny_config
from ds41jax.checkpoint.synthetic import make_checkpoint
from ds41jax.cli import main
from ds41jax.engine.hosts import read_hosts
from ds41jax.kernels.cards import ALL_PARTS, Part

MAIN = [sys.executable, "-c", "from ds41jax.cli import main; raise SystemExit(main())"]
ASKED = ["generate", "why?", "--max-tokens", "6", "--temperature", "0.7", "--seed", "3"]
ASKED += ["--no-dspark", "--prefill", "exact"]  # few programs, which each host compiles
SECONDS = 900


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


def words(out: str) -> str:
    """What the command said; the transport of CPU collectives reports its links there too."""
    lines = out.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("[Gloo]"))


def deployment(file: Path, **changes: object) -> Path:
    """A file of two hosts, with fields changed."""
    fields = {"address": "127.0.0.1:9910", "hosts": 2, "cards": 2, "split": ["attention"]}
    lines = [f"{name} = {json.dumps(value)}" for name, value in (fields | changes).items()]
    file.write_text("\n".join(lines))
    return file


def test_two_hosts_answer_as_one_with_two_cards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same sums in the same order, so the same bits and words; only host 0 speaks."""
    folder, parts = tmp_path / "tiny", [part.value for part in Part]
    make_checkpoint(folder, tiny_config(), seed=0, progress=False)
    asked = [*ASKED, "--model", str(folder)]
    file = deployment(tmp_path / "h.toml", address=f"127.0.0.1:{free_port()}", split=parts)
    meet = ["--hosts", str(file), "--host"]
    hosts = [start([*asked, *meet, str(index)], tmp_path) for index in range(2)]
    try:
        said = [host.communicate(timeout=SECONDS) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], said
    assert main([*asked, "--cards", "2"]) == 0
    first, other = (words(out) for out, _ in said)
    assert first == capsys.readouterr().out
    assert len(first) > 1 and other == ""


def test_the_sample_is_a_deployment() -> None:
    found = read_hosts(ROOT / "configs" / "two-hosts.toml")
    assert (found.hosts, found.cards, found.split) == (2, 2, ALL_PARTS)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"address": "nowhere"}, "HOST:PORT"),
        ({"address": "host:0"}, "HOST:PORT"),
        ({"address": "host:99999"}, "HOST:PORT"),
        ({"hosts": 1}, "hosts must be at least 2"),
        ({"cards": 3}, "cards must be a multiple of 2"),
        ({"cards": "2"}, "cards must be given, as int"),
        ({"split": ["heads"]}, "heads"),
        ({"port": 1}, "unknown field port"),
    ],
)
def test_hosts_that_cannot_be_are_refused(
    changes: dict[str, object], what: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=what):
        read_hosts(deployment(tmp_path / "h.toml", **changes))


@pytest.mark.parametrize(
    ("more", "what"), [(["--host", "2"], "from 0 to 1"), (["--cards", "2"], "leave them out")]
)
def test_arguments_that_contradict_the_file_are_refused(
    more: list[str], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ASKED, "--hosts", str(deployment(tmp_path / "h.toml")), *more]) == 1
    assert what in capsys.readouterr().err
