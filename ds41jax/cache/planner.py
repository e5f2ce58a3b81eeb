"""Memory plan: what lies on each card, decided before anything is loaded.

The order matters: weights, workspaces, active slots, snapshot arena and headroom first, then the
page pool, then as many routed-expert layers as still fit, if they may be elsewhere. The tighter
card decides. Sizes come from the declarations of `model.params` and from `init_state` itself.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import jax

from ds41jax.cache.plan_sizes import MAX_GROUPS, group_count
from ds41jax.cache.pool import PageLayout
from ds41jax.config import ModelConfig
from ds41jax.kernels.cards import Cards
from ds41jax.kernels.compute import REFERENCE, Compute
from ds41jax.model.params import param_specs, spec_leaves
from ds41jax.model.state import PAGE_ROWS, CacheShape, init_state

GIB = 1 << 30
MIB = 1 << 20
# A constant headroom of 2 GiB failed a published 16-wide run; 3.56 GiB more carried it.
HEADROOM_PER_SLOT = 228 * MIB


class PlanError(ValueError):
    """The request does not fit; the message says by how much and on which card."""


@dataclass(frozen=True)
class Placement:
    """What one card holds, as shares of each class of weights."""

    dense: Fraction = Fraction(1)
    embeddings: Fraction = Fraction(1)
    routed: Fraction = Fraction(1)
    drafter: Fraction = Fraction(1)
    vision: Fraction = Fraction(1)


HALF = Fraction(1, 2)
ONE_CARD = (Placement(),)
TWO_CARDS = (
    Placement(HALF, HALF, HALF, drafter=Fraction(0)),
    Placement(HALF, HALF, HALF, vision=Fraction(0)),
)


@dataclass(frozen=True)
class PlanOptions:
    """What is asked for.

    Attributes:
      slots: active requests.
      retained: snapshots of each bank.
      spare_slots: arena slots besides.
      context: tokens of one request.
      max_pool_tokens: upper end of the default pool.
      pool_tokens: a pool that must fit, or None for the default, which shrinks.
      routed_layers: layers whose experts lie on the cards; None for all, "auto" for what fits.
      rows: widest step, for the estimate of workspaces.
      workspace_bytes: overrides that estimate.
      headroom_bytes: left free on each card, or None for the default; it grows with `slots`.
      reservation_bytes: ceiling of all that is planned on a card, or None.
    """

    slots: int = 16
    retained: int = 20
    spare_slots: int = 0
    context: int = 1 << 20
    max_pool_tokens: int = 14 << 20
    pool_tokens: int | None = None
    routed_layers: int | str | None = None
    rows: int = 256
    workspace_bytes: int | None = None
    headroom_bytes: int | None = None
    reservation_bytes: int | None = None


@dataclass(frozen=True)
class Weights:
    """Bytes of each class, over all cards; routed experts a layer."""

    dense: int
    embeddings: int
    routed_layer: int
    drafter: int
    vision: int


@dataclass(frozen=True)
class MemoryPlan:
    """A plan that fits.

    Attributes:
      groups, pages: of the pool, the same on every card: all cards read all global rows.
      arena_slots: snapshot slots after the active ones.
      routed_layers: layers, from 0 on, whose experts lie on the cards.
      cards: (name, bytes) of everything on each card; the last line is what is left.
    """

    groups: int
    pages: int
    slots: int
    arena_slots: int
    routed_layers: int
    device_bytes: tuple[int, ...]
    cards: tuple[tuple[tuple[str, int], ...], ...] = field(repr=False)

    def table(self) -> str:
        """The plan for people."""
        names = [name for name, _ in self.cards[0]]
        heads = "".join(f"{f'card {n}':>16}" for n in range(len(self.cards)))
        lines = [f"{'MiB':<22}{heads}"]
        for row, name in enumerate(names):
            cells = "".join(f"{card[row][1] / MIB:>16,.1f}" for card in self.cards)
            lines.append(f"{name:<22}{cells}")
        lines.append(f"{self.pages} pages in {self.groups} groups; {self.slots} active and ")
        lines[-1] += f"{self.arena_slots} retained slots; experts of {self.routed_layers} layers"
        return "\n".join(lines)


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays, or descriptions of arrays, in a tree."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def weight_bytes(config: ModelConfig) -> Weights:
    """From the declarations of all weights."""
    params = param_specs(config)

    def size(tree: Any) -> int:
        return sum(tree_bytes(leaf.abstract()) for leaf in spec_leaves(tree))

    routed = size(params.layers.ffn.experts)
    embeddings = size((params.embed, params.head))
    drafter, vision = size(params.drafter), size(params.vision)
    return Weights(
        dense=size(params) - routed - embeddings - drafter - vision,
        embeddings=embeddings,
        routed_layer=routed // config.num_hidden_layers,
        drafter=drafter,
        vision=vision,
    )


def split_placements(config: ModelConfig, cards: Cards) -> tuple[Placement, ...]:
    """What each card holds of a model over `cards`: its share of what is split, all of the rest."""

    def held(tree: Any) -> Fraction:
        whole, share = 0, Fraction(0)
        for leaf in spec_leaves(tree):
            size = tree_bytes(leaf.abstract())
            split = leaf.split is not None and cards.splits(leaf.split.part)
            whole, share = whole + size, share + Fraction(size, cards.count if split else 1)
        return share / whole if whole else Fraction(1)

    params = param_specs(config)
    block = params.layers
    rest = (block.hc_attn, block.hc_ffn, block.ffn.gate, block.ffn.shared_experts)
    sources = (params.compressor, params.indexer, params.engram)
    each = Placement(
        dense=held((block.attn, rest, sources)),
        embeddings=held((params.embed, params.head)),
        routed=held(block.ffn.experts),
        drafter=held(params.drafter),
        vision=held(params.vision),
    )
    return (each,) * cards.count


def state_bytes(config: ModelConfig, compute: Compute = REFERENCE) -> tuple[int, int]:
    """Bytes of one slot and of one page of the caches."""

    def size(slots: int, pages: int) -> int:
        shape = CacheShape(slots, pages)
        return tree_bytes(jax.eval_shape(lambda: init_state(config, shape, compute)))

    both = size(1, 1)
    return size(2, 1) - both, size(1, 2) - both


def workspace_bytes(config: ModelConfig, options: PlanOptions) -> int:
    """A step's temporaries: streams, query heads, index scores of all visible rows, logits."""
    c = config
    a_row = 4 * c.hc_mult * c.hidden_size + 3 * c.num_attention_heads * c.head_dim
    a_row += 2 * c.vocab_size + c.index_n_heads * c.index_head_dim
    a_row += 2 * options.context // min(c.source_ratios, default=1)
    return 4 * options.rows * a_row


def plan_memory(
    config: ModelConfig,
    device_bytes: Sequence[int],
    options: PlanOptions | None = None,
    *,
    placements: Sequence[Placement] | None = None,
    compute: Compute = REFERENCE,
) -> MemoryPlan:
    """Plans each card.

    Args:
      device_bytes: what each card can give, one or two of them.
      placements: how weights are shared out; `ONE_CARD` or `TWO_CARDS` by default.

    Raises:
      PlanError: saying what is missing, where, and by how much.
    """
    options = options or PlanOptions()
    placements = placements or (ONE_CARD if len(device_bytes) == 1 else TWO_CARDS)
    if len(placements) != len(device_bytes):
        raise PlanError(f"{len(device_bytes)} cards but {len(placements)} placements")
    weights = weight_bytes(config)
    slot_bytes, page = state_bytes(config, compute)
    budgets = [min(b, options.reservation_bytes or b) for b in device_bytes]
    cards = [_fixed(config, weights, p, options, slot_bytes) for p in placements]
    required = _required_layers(config, options)
    for card, placement in zip(cards, placements, strict=True):
        card["routed experts"] = _share(required * weights.routed_layer, placement.routed)
    left = [budget - sum(card.values()) for budget, card in zip(budgets, cards, strict=True)]
    layout = PageLayout(config.source_ratios, PAGE_ROWS)
    groups = _pool_groups(layout, page, options, left)
    for n, card in enumerate(cards):
        card["page pool"] = groups * layout.group_pages * page
        left[n] -= card["page pool"]
    if options.routed_layers == "auto":
        required = _fill_layers(config, weights, placements, cards, left)
    for card, rest in zip(cards, left, strict=True):
        card["left"] = rest
    return MemoryPlan(
        groups=groups,
        pages=groups * layout.group_pages,
        slots=options.slots,
        arena_slots=_arena_slots(options),
        routed_layers=required,
        device_bytes=tuple(device_bytes),
        cards=tuple(tuple(card.items()) for card in cards),
    )


def _share(total: int, share: Fraction) -> int:
    return math.ceil(total * share)


def _arena_slots(options: PlanOptions) -> int:
    return 2 * options.retained + options.spare_slots


def _required_layers(config: ModelConfig, options: PlanOptions) -> int:
    layers = options.routed_layers
    if layers is None:
        return config.num_hidden_layers
    if isinstance(layers, str):
        if layers != "auto":
            raise PlanError(f'routed_layers must be a number, None or "auto", not {layers!r}')
        return 0
    if not 0 <= layers <= config.num_hidden_layers:
        raise PlanError(f"routed_layers {layers} is outside 0 to {config.num_hidden_layers}")
    return layers


def _fixed(
    config: ModelConfig, weights: Weights, place: Placement, options: PlanOptions, slot_bytes: int
) -> dict[str, int]:
    """What a card holds before the pool, in the order of the table."""
    headroom = options.headroom_bytes
    if headroom is None:
        headroom = 2 * GIB + options.slots * HEADROOM_PER_SLOT
    workspace = options.workspace_bytes
    if workspace is None:
        workspace = workspace_bytes(config, options)
    return {
        "dense weights": _share(weights.dense, place.dense),
        "embeddings and head": _share(weights.embeddings, place.embeddings),
        "drafter": _share(weights.drafter, place.drafter),
        "vision": _share(weights.vision, place.vision),
        "routed experts": 0,
        "workspaces": workspace,
        "active slots": options.slots * slot_bytes,
        "snapshot arena": _arena_slots(options) * slot_bytes,
        "headroom": headroom,
    }


def _pool_groups(layout: PageLayout, page: int, options: PlanOptions, left: list[int]) -> int:
    """Groups that every card can hold: what was asked for, or the default shrunk to fit."""
    if not layout.ratios:
        _must_fit(0, left, "weights, slots and headroom")
        return 0
    group = layout.group_pages * page
    explicit = options.pool_tokens is not None
    tokens = options.pool_tokens
    if tokens is None:
        tokens = min(options.context * options.slots, options.max_pool_tokens)
    tokens = -(-tokens // layout.group_tokens) * layout.group_tokens
    wanted = min(group_count(layout, tokens, options.slots, options.retained, 0, group), MAX_GROUPS)
    least = 2 * options.slots + 2 * options.retained
    if explicit and wanted < least:
        raise PlanError(f"a pool needs at least {least} groups for its tails, not {wanted}")
    _must_fit(
        (wanted if explicit else min(wanted, least)) * group,
        left,
        "the page pool with all before it",
    )
    return wanted if explicit else min(wanted, min(left) // group)


def _must_fit(needed: int, left: list[int], what: str) -> None:
    tight = min(range(len(left)), key=lambda n: left[n])
    if left[tight] < needed:
        short = needed - left[tight]
        raise PlanError(
            f"{what} does not fit: card {tight} lacks {short:,} bytes ({short / GIB:.2f} GiB)"
        )


def _fill_layers(
    config: ModelConfig,
    weights: Weights,
    placements: Sequence[Placement],
    cards: list[dict[str, int]],
    left: list[int],
) -> int:
    """Puts whole layers' experts, from layer 0 on, where there is room on every card."""
    sizes = [_share(weights.routed_layer, p.routed) for p in placements]
    fits = [rest // size for rest, size in zip(left, sizes, strict=True) if size]
    layers = min(config.num_hidden_layers, *fits)
    for n, size in enumerate(sizes):
        cards[n]["routed experts"] = layers * size
        left[n] -= layers * size
    return layers
