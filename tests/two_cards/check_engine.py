"""The engine over two devices: the same laws as on one.

Run by `tests/test_two_cards.py` in a process that has two devices.
"""

import dataclasses
import functools

import jax
import pytest
from engine_runs import Run, options, prompt, request
from oracle import tiny_model
from split_runs import cards_agree

from ds41jax.cache.radix import Reuse
from ds41jax.engine.core import EngineCore
from ds41jax.kernels.cards import ALL_PARTS, Part
from ds41jax.kernels.compute import FLOAT32


def run(cards: int = 2, split: frozenset[Part] = ALL_PARTS, **changes: object) -> Run:
    return Run(EngineCore(tiny_model(), options(cards=cards, split=split, **changes)))


REQUESTS = (
    request(prompt(1, 30), 8),
    request(prompt(2, 11), 8, seed=3),
    request(prompt(3, 70), 6),
)


@functools.cache
def together() -> list[list[int]]:
    """The tokens of REQUESTS, drafted, side by side on two cards."""
    return run().all(REQUESTS)


def test_neighbours_and_drafts_change_nothing() -> None:
    alone = run(dspark=False)
    assert [alone.all([r])[0] for r in REQUESTS] == together()


def test_a_prefix_is_reused() -> None:
    engine = run(reuse=Reuse.EXACT)
    first, second = engine.all([REQUESTS[2]]), engine.all([REQUESTS[2]])
    assert first == second == [together()[2]]
    assert engine.core.counters.cached_tokens > 0
    assert cards_agree(engine.core.device.state)


def test_float32_tokens_are_those_of_one_card() -> None:
    """Without rounding to few bits, another order of a sum changes no choice here."""
    smooth = functools.partial(run, compute=FLOAT32, dspark=False)
    one, other = smooth(cards=1), smooth()
    assert other.all(REQUESTS[:1]) == one.all(REQUESTS[:1])


def test_weights_lie_on_both_cards() -> None:
    core = run().core
    head = core.device.model.params.head
    assert {shard.device for shard in head.addressable_shards} == set(jax.devices())
    assert all(s.data.shape[0] * 2 == head.shape[0] for s in head.addressable_shards)


def test_too_few_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="3 cards are wanted"):
        EngineCore(tiny_model(), dataclasses.replace(options(), cards=3))
