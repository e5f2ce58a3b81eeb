"""How the nano model was made, as numbers: phases, rates, seeds. One place, so that it is one
command."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ds41jax.training.batches import Shape
from ds41jax.training.trainer import Phase

SHORT, LONG = 1024, 8192  # tokens of the two kinds of training rows


@dataclass(frozen=True)
class Recipe:
    """All choices of a run.

    Attributes:
      seed: of weights, order of rows and anchors.
      rate, drafter_rate: highest learning rates.
      phases: of the target.
      drafter_steps: steps of the drafter after that; drafter_rows: rows of a step.
      anchors: blocks drafted a row of a step.
    """

    seed: int = 0
    rate: float = 2e-3
    drafter_rate: float = 2e-3
    phases: tuple[Phase, ...] = field(default_factory=lambda: nano_phases(1.0))
    drafter_steps: int = 2400
    drafter_rows: int = 32
    anchors: int = 128

    @property
    def steps(self) -> int:
        """Of the target."""
        return sum(phase.steps for phase in self.phases)

    def to_json(self) -> dict[str, Any]:
        """For the model card and the log."""
        return asdict(self)


def nano_phases(scale: float) -> tuple[Phase, ...]:
    """Three short steps to every long one, from the beginning.

    Documents of the short rows are mostly no longer than a selection, so the indexer learns from
    attention that has seen everything before it has to choose.
    """
    return (
        Phase(steps=int(3600 * scale), shape=Shape(32, SHORT)),
        Phase(steps=int(1200 * scale), shape=Shape(4, LONG), long=True),
    )


def smoke_phases() -> tuple[Phase, ...]:
    """A few small steps of every kind, to see that the recipe runs."""
    return (
        Phase(steps=2, shape=Shape(2, SHORT)),
        Phase(steps=1, shape=Shape(1, LONG), long=True),
    )


def write_log(path: Path, entry: dict[str, Any]) -> None:
    """Appends one line of JSON."""
    with open(path, "a", encoding="utf-8") as log:
        log.write(json.dumps(entry) + "\n")
