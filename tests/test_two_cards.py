"""Checks that need two devices, each file in a process of its own that has two virtual ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "two_cards"
TWO_DEVICES = "--xla_force_host_platform_device_count=2"


# What the everyday run keeps; each layout of the others compiles programs of its own for minutes.
QUICK = (
    "there_are or sums_are or refused or bytes or loading "
    "or (float32_logits and attention+experts+vocabulary)"
)


def check(file: str, *options: str) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", ""]
    done = subprocess.run(
        [*command, str(FOLDER / file), *options],
        env={**kept, "XLA_FLAGS": TWO_DEVICES},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_one_model_on_two_devices() -> None:
    check("check_model.py", "-k", QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("check_*.py")))
def test_everything_on_two_devices(file: str) -> None:
    check(file)
