"""A checkpoint folder made ready to run."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from ds41jax.checkpoint.reader import load_params, open_engram_tables
from ds41jax.config import ConfigError, ModelConfig, load_config
from ds41jax.engine.engram_lookup import EngramLookup
from ds41jax.kernels.cards import Cards
from ds41jax.model import sharding
from ds41jax.model.engram_hash import EngramHash, load_token_map
from ds41jax.model.params import Params
from ds41jax.tokenizer import FILE_NAME, Tokenizer


@dataclass(frozen=True)
class Model:
    """Weights on the device, Engram tables on disk, and the tokenizer if the folder has one."""

    path: Path
    config: ModelConfig
    params: Params
    engram: EngramLookup | None
    tokenizer: Tokenizer | None


def load_model(
    path: str | Path,
    *,
    progress: bool = True,
    cards: Cards | None = None,
    local_layers: int | None = None,
) -> Model:
    """Loads a checkpoint in the official layout.

    Args:
      path: folder with config.json, the safetensors files and a tokenizer.json; an
        engram_token_map.json may replace the tokenizer where no text is needed.
      progress: shows a bar on stderr while weights load.
      cards: over which the weights are split; jax's default device if None.
      local_layers: routed experts of the layers from here on are elsewhere (`fabric`).

    Raises:
      ConfigError, CheckpointError, TokenizerError: all `ValueError`, saying what is wrong.
    """
    path = Path(path)
    config = load_config(path)
    engram = None
    if config.engram_layer_ids:
        hash_ = EngramHash.from_config(config, load_token_map(path, config))
        engram = EngramLookup(hash_, open_engram_tables(path, config))
    tokenizer = _load_tokenizer(path, config)
    params = load_params(path, config, progress=progress, cards=cards, local_layers=local_layers)
    return Model(path=path, config=config, params=params, engram=engram, tokenizer=tokenizer)


def on_cards(model: Model, cards: Cards | None) -> Model:
    """The model with its weights split over cards; those that lie there already are not moved."""
    if cards is None:
        return model
    return dataclasses.replace(model, params=sharding.place(model.params, model.config, cards))


def _load_tokenizer(path: Path, config: ModelConfig) -> Tokenizer | None:
    if not (path / FILE_NAME).exists():
        return None
    tokenizer = Tokenizer.from_checkpoint(path)
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"{path / FILE_NAME} has {tokenizer.vocab_size} tokens, config.json's "
            f"text_config.vocab_size is {config.vocab_size}"
        )
    return tokenizer
