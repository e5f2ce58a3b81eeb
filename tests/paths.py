"""Where the tests find the data recorded from the official implementation."""

from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"
