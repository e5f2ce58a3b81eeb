"""Fixtures that several test modules share."""

import gc
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from ds41jax.checkpoint.presets import tiny_config
from ds41jax.checkpoint.synthetic import make_checkpoint
from ds41jax.engine.loading import Model, load_model
from ds41jax.kernels import compute

# Workers compile the same programs: whoever is first leaves them to the other.
_COMPILED = Path(__file__).parent.parent / ".pytest_cache" / "compiled"
jax.config.update("jax_compilation_cache_dir", str(_COMPILED))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernels",
        choices=[kind.value for kind in compute.Kernels],
        help="of REFERENCE in tests: 'pallas' puts a GPU's kernels to the golden values",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported, and with it the constant."""
    if chosen := config.getoption("--kernels"):
        compute.REFERENCE = compute.Compute(kernels=compute.Kernels(chosen))


@pytest.fixture(autouse=True, scope="module")
def few_programs() -> Iterator[None]:
    """Frees a module's programs: each holds memory maps, of which a process may have 65,530."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def model() -> Model:
    """The tiny checkpoint of the golden data, loaded once."""
    from oracle import tiny_model  # not before the options are known

    return tiny_model()


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A tiny random checkpoint that has a tokenizer, loaded once."""
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint(path, tiny_config(), seed=0, progress=False)
    return load_model(path, progress=False)
