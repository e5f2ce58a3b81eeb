"""Starts, watches and stops a deployment.

Order: check every host, plan the boundary between local and remote layers, start the workers with
it, wait until they are ready, start the coordinator. A worker that ends is started again a few
times; when the coordinator ends, or on a signal, everything ends.
"""

import json
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from ds41jax.cache.planner import PlanOptions, plan_memory
from ds41jax.config import load_config
from ds41jax.fabric.deployment import AUTO, Deployment, DeploymentError, WorkerProcess
from ds41jax.fabric.host import host_report
from ds41jax.fabric.topology import find_topology, make_placement

CHECK_SECONDS = 120.0
READY_SECONDS = 1800.0  # hundreds of gigabytes from a disk
STOP_SECONDS = 30.0
POLL_SECONDS = 0.1


def say(text: str) -> None:
    print(text, flush=True)


def find_boundary(deployment: Deployment) -> int:
    """The first remote layer: as given, or what the coordinator's devices leave room for.

    Raises:
      ValueError: if the rest of the model does not fit there.
    """
    if deployment.first_layer != AUTO:
        return int(deployment.first_layer)
    config = load_config(deployment.coordinator.model)
    serve = deployment.serve
    options = PlanOptions(
        slots=serve.get("concurrency", 16),
        retained=serve.get("prefix-cache-entries", 20),
        context=serve.get("max-context-tokens", 16384),
        pool_tokens=serve.get("kv-pool-tokens"),
        rows=deployment.rows,
        routed_layers=AUTO,
    )
    layers = plan_memory(config, deployment.devices, options).routed_layers
    return min(layers, config.num_hidden_layers - 1) if deployment.workers else layers


def check_hosts(deployment: Deployment, first_layer: int) -> list[str]:
    """Asks every worker's host about itself; the problems found, each naming rank and host."""
    if not deployment.workers:
        return []
    config = load_config(deployment.coordinator.model)
    topology = find_topology(deployment.topology)
    placement = make_placement(config, topology, first_layer, deployment.owners)
    here = host_report(Path(deployment.coordinator.model), placement, "127.0.0.1", 0)
    problems = []
    with ThreadPoolExecutor(len(deployment.workers)) as pool:
        reports = pool.map(
            lambda rank: _host_facts(deployment, rank, first_layer), range(topology.ranks)
        )
        for rank, facts in enumerate(reports):
            where = f"rank {rank} on {deployment.workers[rank].host}"
            found = _compare(facts, vars(here), deployment.workers[rank])
            problems += [f"{where}: {problem}" for problem in found]
            if not found:
                ports = ", ".join(facts["rdma_ports"]) or "no RDMA port"
                say(
                    f"  {where}: {facts['available'] / 2**30:.1f} GiB free, the slice takes "
                    f"{facts['needed'] / 2**30:.1f} GiB; {ports}"
                )
    return problems


def _host_facts(deployment: Deployment, rank: int, first_layer: int) -> dict[str, Any]:
    arguments = [*deployment.worker_arguments(rank, first_layer), "--check"]
    command = deployment.workers[rank].shell(arguments)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=CHECK_SECONDS,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            return {"failure": f"{command[0]} ended with {done.returncode}: {done.stderr[-500:]}"}
        facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return facts
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return {"failure": str(error)}


def _compare(facts: dict[str, Any], here: dict[str, Any], worker: WorkerProcess) -> list[str]:
    if "failure" in facts:
        return [facts["failure"]]
    problems = [
        f"{name} is {facts[name]} there and {here[name]} here"
        for name in ("engine", "model")
        if facts[name] != here[name]
    ]
    if not facts["port_free"]:
        problems.append(f"the port of {worker.address} is taken")
    if facts["available"] < facts["needed"]:
        problems.append(
            f"the slice takes {facts['needed']:,} bytes, {facts['available']:,} are available "
            "(cached files count as used where the GPU shares the memory: drop them first)"
        )
    return problems


class Running:
    """A started process whose output is shown line by line under its name."""

    def __init__(self, name: str, command: list[str]):
        self.name, self.command, self.starts = name, command, 0
        self.ready = threading.Event()
        self.start()

    def start(self) -> None:
        self.starts += 1
        self.ready.clear()
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # signals are passed on in order, not by the terminal
        )
        assert self.process.stdout is not None
        threading.Thread(target=self._show, args=(self.process.stdout,), daemon=True).start()

    def _show(self, output: IO[str]) -> None:
        for line in output:
            say(f"[{self.name}] {line.rstrip()}")
            if line.startswith("Ready: "):
                self.ready.set()

    @property
    def ended(self) -> int | None:
        return self.process.poll()

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Asks it to end, over SSH through its standard input, and makes it after a while."""
        if self.ended is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            if self.command[0] != "ssh":
                self.process.terminate()
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Launch:
    """The running processes of a deployment."""

    def __init__(self, deployment: Deployment, first_layer: int):
        self.deployment, self.first_layer = deployment, first_layer
        self.workers: list[Running] = []
        self.coordinator: Running | None = None
        self._stopping = threading.Event()

    def run(self) -> int:
        """Until the coordinator ends or a signal comes; its exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stopping.set())
        try:
            self._start_workers()
            if self._stopping.is_set():
                return 130
            arguments = self.deployment.serve_arguments(self.first_layer)
            command = self.deployment.coordinator.shell(arguments)
            self.coordinator = Running("coordinator", command)
            return self._watch()
        finally:
            self._stop()

    def _start_workers(self) -> None:
        deployment = self.deployment
        for rank, worker in enumerate(deployment.workers):
            command = worker.shell(deployment.worker_arguments(rank, self.first_layer))
            self.workers.append(Running(f"worker {rank}", command))
        until = time.monotonic() + READY_SECONDS
        while not all(worker.ready.is_set() for worker in self.workers):
            ended = [w for w in self.workers if w.ended is not None]
            if ended:
                raise DeploymentError(f"{ended[0].name} ended with {ended[0].ended} at its start")
            if time.monotonic() > until:
                late = [w.name for w in self.workers if not w.ready.is_set()]
                raise DeploymentError(f"not ready after {READY_SECONDS:g} s: {', '.join(late)}")
            if self._stopping.wait(POLL_SECONDS):
                return
        if self.workers:
            say(f"All {len(self.workers)} workers are ready.")

    def _watch(self) -> int:
        assert self.coordinator is not None
        while self.coordinator.ended is None and not self._stopping.wait(POLL_SECONDS):
            for worker in self.workers:
                if worker.ended is None:
                    continue
                if worker.starts > self.deployment.restarts:
                    say(f"{worker.name} ended {worker.starts} times: giving up")
                    return 1
                say(f"{worker.name} ended with {worker.ended}: starting it again")
                worker.start()
        if self._stopping.is_set():
            say("Stopping: running requests may finish.")
            self.coordinator.stop(self.deployment.serve.get("drain-seconds", 600) + STOP_SECONDS)
        return self.coordinator.ended or 0

    def _stop(self) -> None:
        if self.coordinator is not None:
            self.coordinator.stop()
        with ThreadPoolExecutor(max(1, len(self.workers))) as pool:
            list(pool.map(Running.stop, self.workers))


def launch(deployment: Deployment, dry_run: bool) -> int:
    """Checks, then starts, or shows what would be started.

    Raises:
      DeploymentError: listing the problems of all hosts.
    """
    first_layer = find_boundary(deployment)
    say(f"Layers below {first_layer} keep their experts here; {len(deployment.workers)} workers.")
    problems = check_hosts(deployment, first_layer)
    if problems:
        raise DeploymentError("\n".join(["nothing was started:", *(f"  {p}" for p in problems)]))
    if not dry_run:
        return Launch(deployment, first_layer).run()
    for rank, worker in enumerate(deployment.workers):
        command = worker.shell(deployment.worker_arguments(rank, first_layer))
        say(f"worker {rank}: {' '.join(command)}")
    command = deployment.coordinator.shell(deployment.serve_arguments(first_layer))
    say(f"coordinator: {' '.join(command)}")
    done = subprocess.run([*command, "--dry-run"], stdin=subprocess.DEVNULL, stdout=sys.stdout)
    return done.returncode
