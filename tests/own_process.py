"""Runs a file of checks in a process of its own, for what a used process cannot show."""

import os
import subprocess
import sys
from pathlib import Path


def check(file: str, *options: str, **environment: str) -> None:
    """Fails with the output of pytest where one of its checks does.

    Args:
      file: below `tests/`; its name does not begin with `test_`, so that pytest finds it only here.
      options: more of pytest's.
      environment: variables to set there.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", ""]
    done = subprocess.run(
        [*command, str(Path(__file__).parent / file), *options],
        env=kept | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
