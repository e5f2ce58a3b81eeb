"""Where the tests find the data recorded from the official implementation."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden"
