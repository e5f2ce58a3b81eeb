"""Checks that need two devices, each file in a process of its own that has two virtual ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "two_cards"
TWO_DEVICES = "--xla_force_host_platform_device_count=2"


@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("check_*.py")))
def test_on_two_devices(file: str) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / file)]
    done = subprocess.run(
        command, env={**kept, "XLA_FLAGS": TWO_DEVICES}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
