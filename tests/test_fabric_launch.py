"""Deployments: their description, what is checked first, and processes that start and stop."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fabric_workers import MAIN, wide_checkpoint
from paths import ROOT

from ds41jax.fabric.deployment import DeploymentError, read_deployment
from ds41jax.fabric.host import MemoryGuard, active_rdma_ports, available_memory, slice_bytes
from ds41jax.fabric.launch import find_boundary, launch
from ds41jax.fabric.topology import Placement, find_topology

CONFIGS = sorted((ROOT / "configs").glob("launch-*.toml"))
PYTHON = [sys.executable, "-c", MAIN]


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def write(path: Path, *lines: str) -> Path:
    file = path / "launch.toml"
    file.write_text("\n".join(lines) + "\n")
    return file


def local(path: Path, *more: str, ports: tuple[int, int] | None = None) -> Path:
    """A deployment of two workers and a server on this host."""
    first, second = ports or (free_port(), free_port())
    return write(
        path,
        f'model = "{wide_checkpoint()}"',
        'topology = "TP2EP1"',
        "first-layer = 4",
        "rows = 64",
        f"command = {json.dumps(PYTHON)}",
        *more,
        "[coordinator]",
        f"serve = {{ concurrency = 1, prefill-batch-tokens = 32, warm-up = false, listen = "
        f'"127.0.0.1:{free_port()}", kv-pool-tokens = 4096, max-context-tokens = 1024 }}',
        "[[worker]]",
        f'address = "127.0.0.1:{first}"',
        "[[worker]]",
        f'address = "127.0.0.1:{second}"',
    )


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_the_examples_are_right(path: Path) -> None:
    made = read_deployment(path)
    assert len(made.workers) == find_topology(made.topology).ranks
    arguments = made.worker_arguments(1, 5)
    assert arguments[arguments.index("--rank") + 1] == "1"
    assert arguments[arguments.index("--first-layer") + 1] == "5"
    assert f"--expert-worker={made.workers[1].address}" in made.serve_arguments(5)


def test_a_remote_command_is_quoted_for_the_shell_there(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        'model = "/models/a b"',
        'topology = "TP2EP1"',
        "first-layer = 1",
        *["[[worker]]", 'host = "one"', 'address = "h:1"', 'environment = {UCX_TLS = "rc,self"}'],
        *["[[worker]]", 'address = "h:2"'],
    )
    made = read_deployment(file)
    command = made.workers[0].shell(made.worker_arguments(0, 1))
    assert command[:4] == ["ssh", "-o", "BatchMode=yes", "one"]
    words = shlex.split(command[4])
    assert words[:4] == ["exec", "env", "UCX_TLS=rc,self", "ds41jax"]
    assert words[words.index("--model") + 1] == "/models/a b"
    assert made.workers[1].shell(["worker"]) == ["ds41jax", "worker"]


def test_every_wrong_field_is_named(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        'topology = "TP5EP1"',
        'first-layer = "half"',
        'rows = "many"',
        'owners = "some"',
        'memory-guard = "a bit"',
        "restart = 1",
        "[coordinator]",
        'host = "far"',
        'devices = ["96"]',
        "[[worker]]",
        'address = "nowhere"',
        'user = "me"',
    )
    with pytest.raises(DeploymentError) as caught:
        read_deployment(file)
    text = str(caught.value)
    for words in (
        "model: is missing",
        "topology: topology must be one of",
        "first-layer: must be",
        "rows: must be of type int",
        "owners: must be one of balanced, fixed",
        "memory-guard: 'a bit' is no size",
        "restart: no such field",
        "coordinator.host: must be localhost",
        "worker[0].address: a worker's address must be HOST:PORT",
        "worker[0].user: no such field",
    ):
        assert words in text


def test_the_number_of_workers_is_the_topology_s(tmp_path: Path) -> None:
    file = write(tmp_path, 'model = "m"', 'topology = "TP2EP1"', "first-layer = 0")
    with pytest.raises(DeploymentError, match="TP2EP1 has 2 ranks, but 0 are listed"):
        read_deployment(file)
    with pytest.raises(DeploymentError, match=r"launch\.toml: .*line 1"):
        read_deployment(write(tmp_path, "model = "))


def test_the_boundary_follows_from_the_devices(tmp_path: Path) -> None:
    """As many layers as the card holds beside its caches; the last one is always remote."""
    config = ROOT / "configs" / "deepseek-v4.1-flash.json"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes(config.read_bytes())
    found = []
    for size in ("96GiB", "141GiB", "900GiB"):
        lines = (ROOT / "configs" / "launch-four-workers.toml").read_text()
        lines = lines.replace('"/models/DeepSeek-V4.1-Flash"', f'"{folder}"')
        file = write(tmp_path, lines.replace("96GiB", size))
        found.append(find_boundary(read_deployment(file)))
    assert 1 <= found[0] < found[1] < 39 and found[2] == 39


def test_slices_have_the_published_sizes() -> None:
    layer = Placement(find_topology("TP4EP1"), 39, 40, 5120, 384, 6, 2304)
    assert slice_bytes(layer) == 1_804_861_440
    layer = Placement(find_topology("TP2EP2"), 39, 40, 5120, 384, 6, 2304)
    assert slice_bytes(layer) == 3_609_722_880


def test_facts_of_a_host(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  100 kB\nMemAvailable:    2048 kB\n")
    assert available_memory(meminfo) == 2 << 20
    for name, state in (("rocep1s0f0", "4: ACTIVE"), ("rocep1s0f1", "1: DOWN")):
        folder = tmp_path / "infiniband" / name / "ports" / "1"
        folder.mkdir(parents=True)
        (folder / "state").write_text(state + "\n")
    assert active_rdma_ports(tmp_path / "infiniband") == ("rocep1s0f0:1",)
    assert active_rdma_ports(tmp_path / "none") == ()


def test_the_guard_stops_before_memory_ends(tmp_path: Path) -> None:
    meminfo, stopped = tmp_path / "meminfo", threading.Event()
    meminfo.write_text("MemAvailable: 2048 kB\n")
    guard = MemoryGuard(1 << 20, stopped.set, meminfo)
    guard.start(every=0.01)
    assert not stopped.wait(0.1)
    meminfo.write_text("MemAvailable: 512 kB\n")
    assert stopped.wait(10)
    assert guard.tripped


def test_a_dry_run_checks_every_host_and_starts_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(read_deployment(local(tmp_path)), dry_run=True) == 0
    out = capfd.readouterr().out
    assert re.search(r"rank 1 on localhost: [\d.]+ GiB free, the slice takes 0\.0 GiB", out)
    assert "worker 0: " in out and "coordinator: " in out
    assert "Every check passed; nothing was loaded." in out


def test_what_a_host_lacks_is_found_before_anything_starts(tmp_path: Path) -> None:
    """A port that is taken, a program that is missing, a host that SSH does not reach."""
    import socket

    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = int(taken.getsockname()[1])
        file = local(tmp_path, ports=(port, free_port()))
        with pytest.raises(DeploymentError, match=f"rank 0 on localhost: the port of .*{port} is"):
            launch(read_deployment(file), dry_run=True)
    text = file.read_text().replace("[[worker]]", '[[worker]]\ncommand = ["/no/ds41jax"]')
    file.write_text(text)
    with pytest.raises(DeploymentError, match=r"rank 1 on localhost: .*/no/ds41jax"):
        launch(read_deployment(file), dry_run=True)
    file.write_text(text.replace("[[worker]]", '[[worker]]\nhost = "nowhere.invalid"'))
    with pytest.raises(DeploymentError, match=r"rank 0 on nowhere\.invalid: "):
        launch(read_deployment(file), dry_run=True)


def test_a_deployment_starts_restarts_and_stops(tmp_path: Path) -> None:
    """Over a stand-in for SSH, so that workers stop with their standard input."""
    stand_in = tmp_path / "ssh"
    stand_in.write_text('#!/bin/sh\nshift 3\nexec sh -c "$1"\n')
    stand_in.chmod(0o755)
    file = local(tmp_path)
    file.write_text(file.read_text().replace("[[worker]]", '[[worker]]\nhost = "elsewhere"'))
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    process = subprocess.Popen(
        [*PYTHON, "launch", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    lines: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: lines.extend(process.stdout))  # type: ignore[arg-type]
    reader.start()

    def wait_for(pattern: str, count: int = 1, seconds: float = 240.0) -> list[str]:
        end = time.monotonic() + seconds
        while len(found := re.findall(pattern, "".join(lines))) < count:
            assert time.monotonic() < end and process.poll() is None, "".join(lines)
            time.sleep(0.05)
        return found

    try:
        pids = wait_for(r"\[worker \d\] Ready: .* process (\d+)", count=2)
        wait_for(r"All 2 workers are ready")
        wait_for(r"\[coordinator\] Ready: http")
        os.kill(int(pids[0]), signal.SIGKILL)
        wait_for(r"ended with -?\d+: starting it again")
        pids += wait_for(r"\[worker \d\] Ready: .* process (\d+)", count=3)[2:]
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
        reader.join(10)
    assert code == 0, "".join(lines)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
