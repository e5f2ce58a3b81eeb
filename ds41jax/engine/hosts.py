"""Several hosts as one: each runs the same program on the same inputs, in lockstep.

There is no coordinator beside them: every host loads its share of the weights, takes every step,
and holds every result. What a host decides must therefore follow from the inputs alone, never from
its clock.
"""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import jax

from ds41jax.kernels.cards import Part

ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\s\[\]]+):([0-9]{1,5})")
MOST_BYTES = 1 << 16
TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Hosts:
    """A deployment of equal hosts.

    Attributes:
      address: HOST:PORT on host 0, where all meet.
      hosts: how many; cards: of all of them together.
      split: what is split over the cards.

    Raises:
      ValueError: naming what is out of range.
    """

    address: str
    hosts: int
    cards: int
    split: frozenset[Part]

    def __post_init__(self) -> None:
        match = ADDRESS.fullmatch(self.address)
        if match is None or not 1 <= int(match[2]) <= 65535:
            raise ValueError(f"address must be HOST:PORT, not {self.address!r}")
        if self.hosts < 2:
            raise ValueError(f"hosts must be at least 2, not {self.hosts}")
        if self.cards < self.hosts or self.cards % self.hosts:
            raise ValueError(f"cards must be a multiple of {self.hosts} hosts, not {self.cards}")

    def join(self, index: int) -> None:
        """Waits for the others; to be called before anything else uses a device.

        Afterwards JAX sees the devices of all hosts.

        Raises:
          ValueError: if there is no such host.
          OSError: if the others do not come in time.
        """
        if not 0 <= index < self.hosts:
            raise ValueError(f"--host must be from 0 to {self.hosts - 1}, not {index}")
        try:
            jax.distributed.initialize(
                coordinator_address=self.address,
                num_processes=self.hosts,
                process_id=index,
                initialization_timeout=TIMEOUT_SECONDS,
            )
        except RuntimeError as error:
            raise OSError(
                f"host {index} of {self.hosts} could not join the others at {self.address}: {error}"
            ) from error


def read_hosts(file: Path) -> Hosts:
    """A deployment from a TOML file with the fields of `Hosts`; see configs/two-hosts.toml.

    Raises:
      ValueError, OSError: saying what is wrong with the file.
    """
    if file.stat().st_size > MOST_BYTES:
        raise ValueError(f"{file} is larger than {MOST_BYTES} bytes")
    try:
        data = tomllib.loads(file.read_text("utf-8"))
        fields = {"address": str, "hosts": int, "cards": int, "split": list}
        for name, kind in fields.items():
            if type(data.get(name)) is not kind:
                raise ValueError(f"{name} must be given, as {kind.__name__}")
        if extra := sorted(set(data) - set(fields)):
            raise ValueError(f"unknown field {extra[0]}")
        return Hosts(**{**data, "split": frozenset(map(Part, data["split"]))})
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
