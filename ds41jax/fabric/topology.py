"""How the routed experts are spread over workers, as plain numbers that both ends agree on.

TP splits the width of every expert: each rank of a group holds some of its columns and answers with
a partial sum over them. EP replicates groups: each holds every expert, and an owner plan says which
group computes which.
"""

import hashlib
import json
from dataclasses import asdict, dataclass

from ds41jax.config import ModelConfig

GROUP = 32  # columns that share a scale: a slice never cuts one
OWNERS = ("balanced", "fixed")
EXPERT_LIMIT, CHOICE_LIMIT, ROW_LIMIT = 512, 16, 4096  # of a frame


@dataclass(frozen=True)
class Topology:
    """`ep` groups of `tp` ranks; rank r belongs to group r // tp.

    Attributes:
      executor: number of rank 0 in frames; rank r answers as executor + r.
    """

    tp: int
    ep: int
    executor: int

    @property
    def name(self) -> str:
        return f"TP{self.tp}EP{self.ep}"

    @property
    def ranks(self) -> int:
        return self.tp * self.ep

    def group(self, rank: int) -> int:
        return rank // self.tp

    def columns(self, rank: int, width: int) -> slice:
        """The columns of every expert that a rank holds.

        Raises:
          ValueError: if experts of this width cannot be split so.
        """
        if width % (self.tp * GROUP):
            raise ValueError(
                f"{self.name} splits experts into multiples of {GROUP} columns, so the width must "
                f"be a multiple of {self.tp * GROUP}; this checkpoint's is {width}"
            )
        share = width // self.tp
        first = rank % self.tp * share
        return slice(first, first + share)


TOPOLOGIES = {
    t.name: t
    for t in (
        Topology(4, 1, 1),
        Topology(2, 1, 5),
        Topology(3, 1, 7),
        Topology(3, 2, 11),
        Topology(2, 2, 17),
        Topology(2, 3, 21),
        Topology(6, 1, 27),
    )
}


def find_topology(name: str) -> Topology:
    """The topology of that name, for example "TP2EP2".

    Raises:
      ValueError: listing the names that exist.
    """
    found = TOPOLOGIES.get(name.upper())
    if found is None:
        raise ValueError(f"topology must be one of {', '.join(sorted(TOPOLOGIES))}, not {name!r}")
    return found


@dataclass(frozen=True)
class Placement:
    """Which layers' routed experts are remote, and how they are spread.

    Attributes:
      topology: of the workers.
      first_layer: layers from here on are remote, those below are local.
      layers: of the model.
      hidden, experts, choices, width: of the model's experts.
      owners: "balanced" spreads the experts of a step over groups by load, so that a row's rounding
        depends on the rows beside it; "fixed" assigns them by number, so that it does not.
    """

    topology: Topology
    first_layer: int
    layers: int
    hidden: int
    experts: int
    choices: int
    width: int
    owners: str = "balanced"

    def __post_init__(self) -> None:
        self.topology.columns(0, self.width)
        if not 0 <= self.first_layer < self.layers:
            raise ValueError(
                f"the first remote layer must lie in 0..{self.layers - 1}, not {self.first_layer}"
            )
        if self.owners not in OWNERS:
            raise ValueError(f"owners must be one of {', '.join(OWNERS)}, not {self.owners!r}")
        if self.experts > EXPERT_LIMIT or self.choices > CHOICE_LIMIT or self.hidden % GROUP:
            raise ValueError(
                f"frames hold at most {EXPERT_LIMIT} experts, {CHOICE_LIMIT} of a row, and rows of "
                f"multiples of {GROUP} columns; this model has {self.experts}, {self.choices} and "
                f"{self.hidden}"
            )

    @property
    def version(self) -> int:
        """64 bits that name this placement in every frame."""
        text = json.dumps(asdict(self), sort_keys=True)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def make_placement(
    config: ModelConfig, topology: Topology, first_layer: int = 0, owners: str = "balanced"
) -> Placement:
    """The placement of a model's experts. Raises `ValueError` where it is impossible."""
    return Placement(
        topology=topology,
        first_layer=first_layer,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        experts=config.n_routed_experts,
        choices=config.num_experts_per_tok,
        width=config.moe_intermediate_size,
        owners=owners,
    )
