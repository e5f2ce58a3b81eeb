"""`python -m ds41jax.training.curves LOG PICTURE`: a run's log as a picture."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure


def read_log(path: Path) -> list[dict[str, Any]]:
    """The entries of a log; of a step that was run twice, after a resumed stop, the later one."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    steps = {(e["part"], e["step"]): e for e in entries if "part" in e}
    return [e for e in entries if "part" not in e] + list(steps.values())


def draw(entries: list[dict[str, Any]], path: Path) -> None:
    """Three panels: the target's loss by kind of rows, the drafter's loss, its acceptance."""
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    target, drafter, acceptance = figure.subplots(1, 3)
    steps = [e for e in entries if e.get("part") == "target"]
    target.plot(*_curve(steps, "loss"), lw=1)
    target.set(title="Target: loss of a training token", xlabel="step", ylabel="nats")
    drafts = [e for e in entries if e.get("part") == "drafter"]
    drafter.plot(*_curve(drafts, "loss"), lw=1)
    drafter.set(title="Drafter: distance and surprise", xlabel="step", ylabel="nats")
    x, met = _curve(drafts, "acceptance")
    _, sure = _curve(drafts, "confidence")
    for position in range(met.shape[1] if met.ndim == 2 else 0):
        (line,) = acceptance.plot(x, met[:, position], lw=1, label=f"draft {position + 1}")
        acceptance.plot(x, sure[:, position], lw=0.8, ls=":", color=line.get_color())
    acceptance.set(title="Acceptance (dotted: confidence)", xlabel="step", ylim=(0, 1))
    acceptance.legend(fontsize=7, loc="lower right")
    for axes in (target, drafter, acceptance):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def _curve(entries: list[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    entries = sorted(entries, key=lambda e: e["step"])
    return np.array([e["step"] for e in entries]), np.array([e[name] for e in entries])


if __name__ == "__main__":
    draw(read_log(Path(sys.argv[1])), Path(sys.argv[2]))
