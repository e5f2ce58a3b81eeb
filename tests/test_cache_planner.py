"""Memory plans: every published figure, our own sizes, refusals that say by how much."""

import json
from fractions import Fraction
from pathlib import Path

import jax
import pytest

from ds41jax.cache.plan_sizes import (
    group_count,
    host_slabs,
    page_bytes,
    rings_bytes,
    routed_layer_bytes,
)
from ds41jax.cache.planner import (
    GIB,
    MIB,
    Placement,
    PlanError,
    PlanOptions,
    plan_memory,
    state_bytes,
    tree_bytes,
    weight_bytes,
)
from ds41jax.cache.pool import PageLayout
from ds41jax.checkpoint.presets import tiny_config
from ds41jax.config import ModelConfig, parse_config
from ds41jax.kernels.compute import FLOAT32, REFERENCE
from ds41jax.model.state import PAGE_ROWS, CacheShape, init_state

OFFICIAL = parse_config(
    json.loads((Path(__file__).parents[1] / "configs/deepseek-v4.1-flash.json").read_text())
)
TINY = parse_config(tiny_config())
LAYOUT = PageLayout(OFFICIAL.source_ratios, PAGE_ROWS)
CONTEXT = 1 << 20
GROUP_BYTES = 455_680

# What upstream keeps besides pages: 128-row rings with an end marker, 4 carry blocks, rounded.
TAIL = rings_bytes(OFFICIAL, 40, 128, marker=8) + 4 * 4096
TAIL_ROUNDED = -(-TAIL // 256) * 256
DRAFT = rings_bytes(OFFICIAL, 3, 128)


def upstream_arena(retained: int) -> int:
    """Bytes of the snapshot slots, two of them spare."""
    return (2 * retained + 2) * (TAIL_ROUNDED + DRAFT)


def test_row_page_and_group_bytes() -> None:
    page = page_bytes(OFFICIAL, PAGE_ROWS)
    assert page == 256 * (288 + 68) == 91_136
    assert LAYOUT.group_pages * page == GROUP_BYTES == 890 * 512
    assert state_bytes(OFFICIAL)[1] == page


def test_tail_blocks() -> None:
    assert rings_bytes(OFFICIAL, 1, 128, marker=8) == 67_592
    assert rings_bytes(OFFICIAL, 40, 128, marker=8) == 2_703_680
    assert (TAIL, TAIL_ROUNDED, DRAFT) == (2_720_064, 2_720_256, 202_752)
    assert upstream_arena(24) == 146_150_400


@pytest.mark.parametrize(
    ("tokens", "retained", "taken", "groups", "size", "positions", "usable"),
    [
        (14 * CONTEXT, 24, 0, 28_736, 13_094_420_480, 14_712_832, 14_680_064),
        (14 * CONTEXT, 20, 0, 28_728, 13_090_775_040, 14_708_736, 14_680_064),
        (18 * CONTEXT, 24, upstream_arena(24), 36_607, 16_681_077_760, 18_742_784, 18_710_016),
        (18 * CONTEXT, 20, upstream_arena(20), 36_650, 16_700_672_000, 18_764_800, 18_736_128),
    ],
    ids=["dual v3", "dual v6", "single v3", "single v6"],
)
def test_published_pools(
    tokens: int, retained: int, taken: int, groups: int, size: int, positions: int, usable: int
) -> None:
    assert group_count(LAYOUT, tokens, 16, retained, taken, GROUP_BYTES) == groups
    assert (groups * GROUP_BYTES, groups * 512) == (size, positions)
    assert positions - 512 * (16 + 2 * retained) == usable


@pytest.mark.parametrize(
    ("ranks", "columns", "size"),
    [
        (1, 1, 7_219_445_760),
        (2, 128, 3_609_722_880),
        (3, 128, 2_406_481_920),
        (4, 1, 1_804_861_440),
        (4, 128, 2_005_401_600),
        (6, 128, 1_203_240_960),
    ],
)
def test_routed_layers(ranks: int, columns: int, size: int) -> None:
    assert routed_layer_bytes(OFFICIAL, ranks, columns) == size


def test_an_expert_has_18800640_bytes_in_the_declarations_too() -> None:
    assert weight_bytes(OFFICIAL).routed_layer == 384 * 18_800_640 == routed_layer_bytes(OFFICIAL)
    with pytest.raises(ValueError, match="5 ranks"):
        routed_layer_bytes(OFFICIAL, 5)


@pytest.mark.parametrize(
    ("device", "groups", "tokens", "pages", "chunks", "gib"),
    [
        (14_680_064, 12_289, 6_291_968, 71_685, (25, 1, 1), 6.75),
        (18_736_128, 4_367, 2_235_904, 32_075, (11, 1, 1), 3.25),
    ],
)
def test_published_host_slabs(
    device: int, groups: int, tokens: int, pages: int, chunks: tuple[int, ...], gib: float
) -> None:
    slabs = host_slabs(
        LAYOUT,
        retained=20,
        context=CONTEXT,
        device_tokens=device,
        page_bytes=91_136,
        snapshot_bytes=(TAIL_ROUNDED, DRAFT),
    )
    assert (slabs.groups, slabs.tokens, slabs.pages, slabs.chunks) == (
        groups,
        tokens,
        pages,
        chunks,
    )
    assert slabs.bytes == gib * GIB and device + tokens == 20 * CONTEXT + 512


def test_published_single_card_chain() -> None:
    """Five layers fit after the pool of v6, as its occupancy implies."""
    budget, before, pool = 101_973_491_712, 45_882_802_176, 16_700_672_000 + 36_650 * 1_214
    layers = (budget - 2 * GIB - before - pool) // routed_layer_bytes(OFFICIAL)
    residency = before + pool + layers * routed_layer_bytes(OFFICIAL)
    assert layers == 5 and 0 < 99_091_742_720 - residency < 0.5 * GIB


@pytest.mark.parametrize("config", [OFFICIAL, TINY], ids=["official", "tiny"])
@pytest.mark.parametrize("compute", [REFERENCE, FLOAT32], ids=["codes", "float32"])
def test_slots_and_pages_are_all_of_the_caches(config: ModelConfig, compute: object) -> None:
    slot, page = state_bytes(config, compute)  # type: ignore[arg-type]
    shape = CacheShape(5, 7)
    state = jax.eval_shape(lambda: init_state(config, shape, compute))  # type: ignore[arg-type]
    assert tree_bytes(state) == 5 * slot + 7 * page


def test_our_slot_at_the_official_geometry() -> None:
    """Rings of two windows and the suffix streams make it four times upstream's."""
    rings = rings_bytes(OFFICIAL, 43, 256)
    suffix = 128 * (4 * 5120 * 2 + 4 * 4)
    assert state_bytes(OFFICIAL)[0] == rings + suffix + 3 * 8 * 2 * 512 * 4 == 11_155_456


def test_the_pool_comes_before_the_layers_on_one_card() -> None:
    plan = plan_memory(OFFICIAL, [139 * GIB], PlanOptions(routed_layers="auto"))
    card = dict(plan.cards[0])
    assert plan.groups == 28_728 and card["page pool"] == 13_090_775_040
    assert plan.routed_layers == 14 and card["left"] < routed_layer_bytes(OFFICIAL)
    assert sum(card.values()) == 139 * GIB
    assert "143640 pages" in plan.table() and "experts of 14 layers" in plan.table()


def test_the_tighter_of_two_cards_decides() -> None:
    plan = plan_memory(OFFICIAL, [139 * GIB] * 2, PlanOptions(routed_layers="auto"))
    first, second = map(dict, plan.cards)
    assert second["drafter"] > 7.9e9 and first["drafter"] == 0
    assert first["left"] > second["left"] and second["left"] < routed_layer_bytes(OFFICIAL, 2)
    smaller = plan_memory(OFFICIAL, [139 * GIB, 120 * GIB], PlanOptions(routed_layers="auto"))
    assert smaller.routed_layers < plan.routed_layers


def test_what_does_not_fit_says_by_how_much() -> None:
    with pytest.raises(PlanError, match=r"card 0 lacks 1\d\d,\d{3},\d{3},\d{3} bytes"):
        plan_memory(OFFICIAL, [139 * GIB])
    with pytest.raises(PlanError, match="tails"):
        plan_memory(OFFICIAL, [139 * GIB], PlanOptions(routed_layers=0, pool_tokens=512))
    with pytest.raises(PlanError, match="routed_layers 41"):
        plan_memory(OFFICIAL, [139 * GIB], PlanOptions(routed_layers=41))


def test_the_default_pool_shrinks_and_an_explicit_one_does_not() -> None:
    asked = PlanOptions(routed_layers=0, headroom_bytes=0, workspace_bytes=0)
    roomy = plan_memory(OFFICIAL, [64 * GIB], asked)
    fixed = sum(size for name, size in roomy.cards[0] if name not in ("page pool", "left"))
    tight = plan_memory(OFFICIAL, [fixed + 100 * GROUP_BYTES + 1], asked)
    assert tight.groups == 100 and dict(tight.cards[0])["left"] == 1
    with pytest.raises(PlanError, match=f"lacks {GROUP_BYTES * (28_728 - 100) - 1:,} bytes"):
        plan_memory(
            OFFICIAL,
            [fixed + 100 * GROUP_BYTES + 1],
            PlanOptions(
                routed_layers=0, headroom_bytes=0, workspace_bytes=0, pool_tokens=14 * CONTEXT
            ),
        )


def test_a_reservation_is_a_ceiling() -> None:
    options = PlanOptions(routed_layers="auto", reservation_bytes=100 * GIB)
    plan = plan_memory(OFFICIAL, [139 * GIB], options)
    assert sum(size for _, size in plan.cards[0]) == 100 * GIB


def test_headroom_grows_with_concurrency() -> None:
    plans = [
        dict(plan_memory(TINY, [64 * GIB], PlanOptions(slots=n, context=4096)).cards[0])
        for n in (1, 16)
    ]
    assert plans[1]["headroom"] - plans[0]["headroom"] == 15 * 228 * MIB


def test_placements_must_match_the_cards() -> None:
    with pytest.raises(PlanError, match="2 cards but 1"):
        plan_memory(TINY, [GIB, GIB], placements=[Placement(Fraction(1))])
