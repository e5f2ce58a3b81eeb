"""Tile sizes as data, and the tuner of the benches in its interpreted form."""

import sys
from pathlib import Path

import pytest

from ds41jax.kernels import choices

sys.path.append(str(Path(__file__).parent.parent / "bench"))
import tune_kernels


def test_generations_without_their_own_numbers_take_the_default() -> None:
    assert choices.of_generation("sm_999") == choices.of_generation(choices.DEFAULT)
    assert choices.current()["attention"]["heads"] == 16


def test_what_is_tried_is_tried_inside_alone() -> None:
    with choices.trying("attention", keys=32):
        assert choices.current()["attention"]["keys"] == 32
        assert choices.current()["attention"]["heads"] == 16
    assert choices.current()["attention"]["keys"] == 64


@pytest.mark.parametrize("name", tune_kernels.TARGETS)
def test_candidates_agree_with_the_current_choice(name: str) -> None:
    target = tune_kernels.TARGETS[name]
    now, other = tune_kernels.tune(name, target, target.smoke_rows, smoke=True)
    assert now["error"] == 0
    assert other["agrees"] and other["sizes"] != now["sizes"]
    assert set(target.candidates) <= set(choices.current()[target.sizes])
