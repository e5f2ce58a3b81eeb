"""Bytes of what is planned: page groups, snapshots, routed experts, host slabs.

Plain arithmetic with every size a parameter, so that the published figures of other engines can be
reproduced next to our own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ds41jax.cache.pool import PageLayout
from ds41jax.config import ModelConfig

MXFP4_GROUP = 32  # values a scale
MAX_GROUPS = 131_072


def page_bytes(config: ModelConfig, page_rows: int) -> int:
    """A page of FP4 rows with E4M3 scales a 16 and MXFP4 index keys."""
    d, i = config.head_dim, config.index_head_dim
    return page_rows * (d // 2 + d // 16 + i // 2 + i // MXFP4_GROUP)


def group_count(
    layout: PageLayout, tokens: int, slots: int, retained: int, taken_bytes: int, group_bytes: int
) -> int:
    """Groups for `tokens` positions, plus one tail for each of `slots` requests and two for each of
    `retained` snapshots a bank, less those whose bytes something else takes."""
    groups = tokens // layout.group_tokens + slots + 2 * retained
    return groups - -(-taken_bytes // group_bytes)


def window_row_bytes(config: ModelConfig) -> int:
    """An FP8 row with a scale a 32."""
    return config.head_dim + config.head_dim // 32


def rings_bytes(config: ModelConfig, layers: int, ring_rows: int, marker: int = 0) -> int:
    """FP8 rings of `layers` layers or stages, each with `marker` bytes that say where it ends."""
    return layers * (ring_rows * window_row_bytes(config) + marker)


def routed_layer_bytes(config: ModelConfig, ranks: int = 1, column_multiple: int = 1) -> int:
    """MXFP4 routed experts of a layer on each of `ranks` that share the expert width.

    Raises:
      ValueError: if the width does not split into whole columns.
    """
    columns, rest = divmod(config.moe_intermediate_size, ranks)
    if rest:
        raise ValueError(f"{config.moe_intermediate_size} columns do not split over {ranks} ranks")
    padded = -(-columns // column_multiple) * column_multiple
    weights = 3 * config.hidden_size * padded
    return config.n_routed_experts * (weights // 2 + weights // MXFP4_GROUP)


@dataclass(frozen=True)
class HostSlabs:
    """Pinned chunks of a host tier.

    Attributes:
      groups: page groups beyond what the device holds.
      tokens: positions in them.
      pages: with staging.
      chunks: of pages and of each snapshot class.
    """

    groups: int
    tokens: int
    pages: int
    chunks: tuple[int, ...]
    bytes: int


def host_slabs(
    layout: PageLayout,
    *,
    retained: int,
    context: int,
    device_tokens: int,
    page_bytes: int,
    snapshot_bytes: Sequence[int],
    chunk_bytes: int = 256 << 20,
) -> HostSlabs:
    """The slabs with which `retained` full contexts a bank have a home on device or host.

    `snapshot_bytes` are the classes that a snapshot has besides its pages.
    """
    extra = max(0, retained * context - device_tokens)
    groups = extra // layout.group_tokens + 1
    staged = groups + context // layout.group_tokens
    pages = staged * layout.group_pages
    counts = [(pages, page_bytes), *((2 * retained + 2, size) for size in snapshot_bytes)]
    chunks = tuple(-(-count // (chunk_bytes // size)) for count, size in counts)
    return HostSlabs(groups, groups * layout.group_tokens, pages, chunks, sum(chunks) * chunk_bytes)
