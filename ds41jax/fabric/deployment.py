"""A deployment as data: one coordinator, its workers, and how to start each.

Read from TOML; every wrong field is named in one error. Commands follow from it alone, so that a
dry run shows exactly what a start runs.
"""

import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds41jax.fabric.handshake import parse_endpoint
from ds41jax.fabric.topology import OWNERS, ROW_LIMIT, find_topology
from ds41jax.plan_command import size_in_bytes

MAX_BYTES = 1 << 20
AUTO = "auto"
LOCAL = "localhost"


class DeploymentError(ValueError):
    """A description that cannot be started; the message lists every wrong field."""


@dataclass(frozen=True)
class Process:
    """One process of a deployment.

    Attributes:
      host: as `ssh` knows it, or "localhost" for this one.
      command: how ds41jax is called there.
      model: the checkpoint's folder there.
      environment: variables set for it, such as UCX_NET_DEVICES.
    """

    host: str
    command: tuple[str, ...]
    model: str
    environment: Mapping[str, str]

    def shell(self, arguments: list[str]) -> list[str]:
        """The argument vector that runs ds41jax there with these arguments."""
        words = [f"{name}={value}" for name, value in sorted(self.environment.items())]
        call = [*(["env", *words] if words else []), *self.command, *arguments]
        if self.host == LOCAL:
            return call
        return ["ssh", "-o", "BatchMode=yes", self.host, "exec " + shlex.join(call)]


@dataclass(frozen=True)
class WorkerProcess(Process):
    """A worker; the coordinator reaches it at `address`."""

    address: str


@dataclass(frozen=True)
class Deployment:
    """See `configs/` for examples.

    Attributes:
      topology: name.
      first_layer: or "auto": as many layers stay with the coordinator as its devices hold.
      devices: bytes of each of the coordinator's devices, for "auto".
      rows: of the largest step.
      transports: UCX_TLS of all, or None.
      guard: bytes of memory below which a worker ends itself; 0 for never.
      serve: options of `ds41jax serve`, by name.
      restarts: times that a worker is started again.
    """

    topology: str
    first_layer: int | str
    owners: str
    rows: int
    transports: str | None
    spin: bool
    guard: int
    restarts: int
    devices: tuple[int, ...]
    serve: Mapping[str, Any]
    coordinator: Process
    workers: tuple[WorkerProcess, ...]

    def worker_arguments(self, rank: int, first_layer: int) -> list[str]:
        """Of `ds41jax`, for a rank, once the boundary is known."""
        worker = self.workers[rank]
        _, port = parse_endpoint(worker.address)
        arguments = [
            *("worker", "--model", worker.model, "--topology", self.topology),
            *("--rank", str(rank), "--first-layer", str(first_layer), "--owners", self.owners),
            *("--rows", str(self.rows), "--listen", f"0.0.0.0:{port}", "--stop-with-stdin"),
        ]
        if self.transports:
            arguments += ["--transports", self.transports]
        if self.guard:
            arguments += ["--memory-guard", str(self.guard)]
        return [*arguments, *(["--spin"] if self.spin else [])]

    def serve_arguments(self, first_layer: int) -> list[str]:
        """Of `ds41jax`, for the coordinator."""
        arguments = ["serve", "--model", self.coordinator.model]
        for name, value in self.serve.items():
            if isinstance(value, bool):
                arguments.append(f"--{name}" if value else f"--no-{name}")
            else:
                values = value if isinstance(value, list) else [value]
                arguments += [f"--{name}={item}" for item in values]
        if not self.workers:
            return arguments
        arguments += [f"--expert-worker={worker.address}" for worker in self.workers]
        arguments += [
            f"--expert-topology={self.topology}",
            f"--expert-first-layer={first_layer}",
            f"--expert-owners={self.owners}",
        ]
        if self.transports:
            arguments.append(f"--expert-transports={self.transports}")
        return [*arguments, *(["--expert-spin"] if self.spin else [])]


def read_deployment(path: Path) -> Deployment:
    """A deployment from its TOML file.

    Raises:
      DeploymentError: naming every field that is wrong.
      OSError: if the file cannot be read.
    """
    raw = path.read_bytes()
    if len(raw) > MAX_BYTES:
        raise DeploymentError(f"{path} is larger than {MAX_BYTES} bytes")
    try:
        table = tomllib.loads(raw.decode("utf-8"))
    except ValueError as error:
        raise DeploymentError(f"{path}: {error}") from error
    fields = _Fields(table, "")
    made = _deployment(fields)
    if fields.problems:
        raise DeploymentError("\n".join([f"{path}:", *(f"  {p}" for p in fields.problems)]))
    return made


def _deployment(fields: "_Fields") -> Deployment:
    model = fields.take("model", str, "")
    if not model:
        fields.problem("model", "is missing: the checkpoint's folder")
    command = tuple(fields.words("command", ["ds41jax"]))
    coordinator = fields.table("coordinator")
    devices = tuple(coordinator.size(text) for text in coordinator.words("devices", []))
    first = fields.raw("first-layer", AUTO)
    if not (first == AUTO or (isinstance(first, int) and first >= 0)):
        fields.problem("first-layer", f'must be "auto" or a number of layers, not {first!r}')
    workers = [_worker(table, model, command) for table in fields.tables("worker")]
    made = Deployment(
        topology=fields.take("topology", str, ""),
        first_layer=first,
        owners=fields.take("owners", str, OWNERS[0]),
        rows=fields.take("rows", int, 256),
        transports=fields.take("transports", str, "") or None,
        spin=fields.take("spin", bool, False),
        guard=fields.size(fields.raw("memory-guard", 0)),
        restarts=fields.take("restarts", int, 3),
        devices=devices,
        serve=coordinator.raw("serve", {}),
        coordinator=_process(coordinator, model, command),
        workers=tuple(workers),
    )
    _check(made, fields)
    for part in (coordinator, fields):
        part.finish()
    return made


def _process(fields: "_Fields", model: str, command: tuple[str, ...]) -> Process:
    return Process(
        host=fields.take("host", str, LOCAL),
        command=tuple(fields.words("command", list(command))),
        model=fields.take("model", str, model),
        environment=fields.environment(),
    )


def _worker(fields: "_Fields", model: str, command: tuple[str, ...]) -> WorkerProcess:
    address = fields.take("address", str, "")
    try:
        parse_endpoint(address)
    except ValueError as error:
        fields.problem("address", str(error))
    process = _process(fields, model, command)
    fields.finish()
    return WorkerProcess(**vars(process), address=address)


def _check(made: Deployment, fields: "_Fields") -> None:
    if made.coordinator.host != LOCAL:
        fields.problem("coordinator.host", "must be localhost: launch runs where it serves")
    if made.owners not in OWNERS:
        fields.problem("owners", f"must be one of {', '.join(OWNERS)}, not {made.owners!r}")
    if not 1 <= made.rows <= ROW_LIMIT:
        fields.problem("rows", f"must be 1 to {ROW_LIMIT}, not {made.rows}")
    if made.restarts < 0:
        fields.problem("restarts", f"must be at least 0, not {made.restarts}")
    if not isinstance(made.serve, dict):
        fields.problem("coordinator.serve", "must be a table of options")
    if made.first_layer == AUTO and made.workers and not made.devices:
        fields.problem("coordinator.devices", 'are needed for first-layer = "auto": ["96GiB"]')
    if not made.topology and not made.workers:
        return  # everything is here
    try:
        topology = find_topology(made.topology)
    except ValueError as error:
        fields.problem("topology", str(error))
        return
    if topology.ranks != len(made.workers):
        text = f"{topology.name} has {topology.ranks} ranks, but {len(made.workers)} are listed"
        fields.problem("worker", text)


class _Fields:
    """A table that is taken apart field by field; what is left at the end is a problem too."""

    def __init__(self, table: Mapping[str, Any], prefix: str, problems: list[str] | None = None):
        self._table, self._prefix = dict(table), prefix
        self.problems: list[str] = [] if problems is None else problems

    def problem(self, name: str, text: str) -> None:
        self.problems.append(f"{self._prefix}{name}: {text}")

    def raw(self, name: str, default: Any) -> Any:
        return self._table.pop(name, default)

    def take(self, name: str, kind: type, default: Any) -> Any:
        value = self.raw(name, default)
        if type(value) is not kind:
            self.problem(name, f"must be of type {kind.__name__}, not {value!r}")
            return default
        return value

    def words(self, name: str, default: list[str]) -> list[str]:
        value = self.raw(name, default)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.problem(name, f"must be a list of texts, not {value!r}")
            return default
        return value

    def size(self, value: Any) -> int:
        try:
            return size_in_bytes(str(value))
        except Exception as error:  # argparse's own type, which is no ValueError
            self.problems.append(f"{self._prefix or 'memory-guard'}: {error}")
            return 0

    def environment(self) -> dict[str, str]:
        value = self.raw("environment", {})
        if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
            self.problem("environment", "must be a table of texts")
            return {}
        return value

    def table(self, name: str) -> "_Fields":
        value = self.raw(name, {})
        if not isinstance(value, dict):
            self.problem(name, "must be a table")
            value = {}
        return _Fields(value, f"{self._prefix}{name}.", self.problems)

    def tables(self, name: str) -> list["_Fields"]:
        value = self.raw(name, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            self.problem(name, "must be written [[worker]], once for every rank")
            return []
        return [_Fields(t, f"{name}[{n}].", self.problems) for n, t in enumerate(value)]

    def finish(self) -> None:
        for name in self._table:
            self.problem(name, "no such field")
