"""Several hosts as one: each runs the same program on the same inputs, in lockstep.

There is no coordinator beside them: every host loads its share of the weights, takes every step,
and holds every result. What a host decides must therefore follow from the inputs alone, never from
its clock.
"""

import re
from dataclasses import dataclass

import jax

ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\s\[\]]+):([0-9]{1,5})")
TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Hosts:
    """One of `count` hosts, the `index`-th; they meet at `address` (HOST:PORT), on host 0.

    Raises:
      ValueError: naming what is out of range.
    """

    address: str
    count: int
    index: int

    def __post_init__(self) -> None:
        match = ADDRESS.fullmatch(self.address)
        if match is None or not 1 <= int(match[2]) <= 65535:
            raise ValueError(f"the hosts' address must be HOST:PORT, not {self.address!r}")
        if self.count < 2:
            raise ValueError(f"there must be at least 2 hosts, not {self.count}")
        if not 0 <= self.index < self.count:
            raise ValueError(f"a host's number is from 0 to {self.count - 1}, not {self.index}")

    @property
    def first(self) -> bool:
        """Whether this is the host that speaks for all."""
        return self.index == 0

    def join(self) -> None:
        """Waits for the others; to be called before anything else uses a device.

        Afterwards JAX sees the devices of all hosts.

        Raises:
          OSError: if they do not come in time.
        """
        try:
            jax.distributed.initialize(
                coordinator_address=self.address,
                num_processes=self.count,
                process_id=self.index,
                initialization_timeout=TIMEOUT_SECONDS,
            )
        except RuntimeError as error:
            raise OSError(
                f"host {self.index} of {self.count} could not join the others at {self.address}: "
                f"{error}"
            ) from error
