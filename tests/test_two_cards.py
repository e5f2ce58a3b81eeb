"""Checks that need two devices, each file in a process of its own that has two virtual ones."""

from pathlib import Path

import pytest
from own_process import check

FOLDER = Path(__file__).parent / "two_cards"
TWO_DEVICES = "--xla_force_host_platform_device_count=2"


# What the everyday run keeps; each layout of the others compiles programs of its own for minutes.
QUICK = (
    "there_are or sums_are or refused or bytes or loading "
    "or (float32_logits and attention+experts+vocabulary)"
)


def test_one_model_on_two_devices() -> None:
    check("two_cards/check_model.py", "-k", QUICK, XLA_FLAGS=TWO_DEVICES)


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("check_*.py")))
def test_everything_on_two_devices(file: str) -> None:
    check(f"two_cards/{file}", XLA_FLAGS=TWO_DEVICES)
