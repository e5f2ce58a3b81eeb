"""Fixtures that several test modules share."""

import gc
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from oracle import tiny_model

from ds41jax.checkpoint.presets import tiny_config
from ds41jax.checkpoint.synthetic import make_checkpoint
from ds41jax.engine.loading import Model, load_model

# Workers compile the same programs: whoever is first leaves them to the other.
_COMPILED = Path(__file__).parent.parent / ".pytest_cache" / "compiled"
jax.config.update("jax_compilation_cache_dir", str(_COMPILED))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


@pytest.fixture(autouse=True, scope="module")
def few_programs() -> Iterator[None]:
    """Frees a module's programs: each holds memory maps, of which a process may have 65,530."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def model() -> Model:
    """The tiny checkpoint of the golden data, loaded once."""
    return tiny_model()


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A tiny random checkpoint that has a tokenizer, loaded once."""
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint(path, tiny_config(), seed=0, progress=False)
    return load_model(path, progress=False)
