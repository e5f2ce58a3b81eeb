"""What the checks on two devices share."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from oracle import Run, recorded, tiny_model

from ds41jax.engine.loading import Model, on_cards
from ds41jax.kernels.cards import ALL_PARTS, Cards, Part
from ds41jax.kernels.compute import Compute
from ds41jax.model.sharding import empty_caches, find_cards
from ds41jax.model.state import CacheShape

LAYOUTS = [*(frozenset({part}) for part in Part), ALL_PARTS]


def layout_name(parts: Any) -> str | None:
    """A readable test id of a layout, the others' by default."""
    return "+".join(sorted(part.value for part in parts)) if isinstance(parts, frozenset) else None


@functools.cache
def split_model(count: int, parts: frozenset[Part]) -> tuple[Model, Cards]:
    """The tiny model over `count` of this process's devices."""
    cards = find_cards(count, parts)
    return on_cards(tiny_model(), cards), cards


def split_run(
    compute: Compute, tokens: np.ndarray, count: int, parts: frozenset[Part] = ALL_PARTS
) -> Run:
    """A run stepped by hand whose steps are programs of `count` cards; 0 for no cards at all."""
    run = Run(compute, tokens)
    if count:
        run.model, cards = split_model(count, parts)
        run.compute = dataclasses.replace(compute, cards=cards)
        shape, whole = CacheShape(1, run.tables.size), run.model.params.norm.sharding
        run.state = empty_caches(run.config, shape, run.compute, whole)
    return run


@functools.cache
def results(
    case: str, compute: Compute, count: int, parts: frozenset[Part] = ALL_PARTS, steps: int = 4
) -> dict[str, Any]:
    """A recorded prompt, some teacher-forced steps and a draft, on `count` cards."""
    case_tokens = recorded("tiny_runs")
    fed = case_tokens[f"{case}.decode_tokens"]
    run = split_run(compute, case_tokens[f"{case}.input_ids"], count, parts)
    logits, hidden = run.full(0, len(run.tokens))
    stepped = [run.append(token)[0] for token in fed[:steps]]
    draft = run.draft(int(fed[steps]))
    return {
        "logits": np.concatenate([logits, np.stack(stepped)]),
        "hidden": hidden,
        "drafts": np.asarray(draft.token_ids),
        "draft_logits": np.asarray(draft.logits),
        "confidence": np.asarray(draft.confidence),
        "state": run.state,
    }


def cards_agree(tree: Any) -> bool:
    """Whether all cards hold the same bits of every array."""
    for array in jax.tree.leaves(tree):
        first, *others = (np.asarray(shard.data) for shard in array.addressable_shards)
        if any(first.tobytes() != other.tobytes() for other in others):
            return False
    return True
