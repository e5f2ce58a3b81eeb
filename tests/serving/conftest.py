"""Fixtures of the server's tests."""

import deepseek_recipe as recipe
import pytest

from ds41jax.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def official() -> Tokenizer:
    """The official vocabulary."""
    return Tokenizer.from_vendor()


@pytest.fixture(scope="session")
def decoder(official: Tokenizer) -> recipe.Tokenizer:
    """The same for deepseek-recipe."""
    return recipe.Tokenizer.from_str(official.to_json().decode())
