"""The checkpoint used when none is given: small, synthetic, made once and cached."""

import sys
from pathlib import Path

import ds41jax
from ds41jax.cache_folder import cache_folder
from ds41jax.checkpoint.presets import default_config
from ds41jax.checkpoint.synthetic import make_checkpoint


def default_model_path() -> Path:
    """Folder of the default checkpoint; makes it on the first call and says so on stderr."""
    path = cache_folder() / f"synthetic-{ds41jax.__version__}"
    print(
        "No checkpoint given: using a small one with random weights. What it writes is noise.",
        file=sys.stderr,
    )
    if not path.exists():
        print(f"Making it once, in {path}", file=sys.stderr)
        path.parent.mkdir(parents=True, exist_ok=True)
        make_checkpoint(path, default_config(), seed=0)
    return path
