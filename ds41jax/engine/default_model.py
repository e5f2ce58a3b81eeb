"""The model used when no checkpoint is given: the nano model that comes with the package."""

import sys
from pathlib import Path

_NANO = Path(__file__).parent.parent / "nano"


def default_model_path() -> Path:
    """Folder of the nano model's checkpoint; says on stderr which model that is."""
    print(
        "No checkpoint given: using the built-in nano model, 14 million weights of the same "
        "architecture. It counts, makes small talk and JSON, and knows next to nothing.",
        file=sys.stderr,
    )
    return _NANO
