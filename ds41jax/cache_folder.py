"""Where this program keeps what it can make again: the default checkpoint, compiled programs."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`ds41jax` under $XDG_CACHE_HOME, by default ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ds41jax"
