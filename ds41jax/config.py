"""The model's numbers: the official nested ``config.json``, parsed, validated, with per-layer
facts.

Owns what the checkpoint says about the network. Deployment choices (numerics, cache sizes, devices)
live elsewhere. A wrong or missing field raises `ConfigError` naming it; nothing is guessed.
"""

import dataclasses
import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

FP8_BLOCK = 32  # quantisation group of activations and side of a weight block
KV_GROUP = 16  # quantisation group of compressed KV rows
MAX_CONFIG_BYTES = 1 << 20


class ConfigError(ValueError):
    """A config.json that this implementation cannot run; the message lists every wrong field."""


@dataclass(frozen=True)
class YarnConfig:
    """YaRN interpolation of the rotary frequencies of compressed layers (arXiv 2309.00071)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower: a ViT with 2-D rotary positions, projected into the text width."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class SelectRole(enum.IntEnum):
    """What a layer does to the selection of global rows."""

    REUSE = 0  # attends to the rows that an earlier layer selected
    SELECT = 1  # scores and selects among all visible rows
    SELECT_AND_FILTER = 2  # the same, and keeps candidate blocks for later layers
    SELECT_WITHIN = 3  # scores and selects within the candidate blocks


@dataclass(frozen=True)
class ModelConfig:
    """DeepSeek-V4.1-Flash: text model, drafter and vision tower. Field names are official."""

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    yarn: YarnConfig
    n_routed_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    vision: VisionConfig | None

    @cached_property
    def layer_ratios(self) -> tuple[int, ...]:
        """Per layer, tokens per global row that it reads; 0 if window only."""
        return self.compress_ratios[: self.num_hidden_layers]

    @cached_property
    def publish_ratios(self) -> tuple[int, ...]:
        """Per layer, tokens per global row that it writes; 0 if it is no KV source."""
        sources = self.kv_source_layer_ids
        return tuple(r if n in sources else 0 for n, r in enumerate(self.layer_ratios))

    @cached_property
    def select_roles(self) -> tuple[SelectRole, ...]:
        """Per layer, its part in selecting global rows."""
        return tuple(self._select_role(layer) for layer in range(self.num_hidden_layers))

    def _select_role(self, layer: int) -> SelectRole:
        source = self.candidate_source_layer_id
        if layer not in self.index_source_layer_ids:
            return SelectRole.REUSE
        if layer == source:
            return SelectRole.SELECT_AND_FILTER
        if source is not None and layer > source:
            return SelectRole.SELECT_WITHIN
        return SelectRole.SELECT

    @property
    def boundary_layer(self) -> int | None:
        """The last KV source, where bounded prefill stops running all rows; None without one."""
        return self.kv_source_layer_ids[-1] if self.kv_source_layer_ids else None

    @cached_property
    def kv_source_index(self) -> tuple[int, ...]:
        """Per layer, which of `kv_source_layer_ids` it reads; -1 if window only."""
        return tuple(
            max(i for i, s in enumerate(self.kv_source_layer_ids) if s <= layer) if ratio else -1
            for layer, ratio in enumerate(self.layer_ratios)
        )

    @cached_property
    def index_source_index(self) -> tuple[int, ...]:
        """Per layer, its place in `index_source_layer_ids`; -1 if it selects nothing itself."""
        return self._places(self.index_source_layer_ids)

    @cached_property
    def engram_index(self) -> tuple[int, ...]:
        """Per layer, its place in `engram_layer_ids`; -1 if it has no Engram."""
        return self._places(self.engram_layer_ids)

    @cached_property
    def tap_index(self) -> tuple[int, ...]:
        """Per layer, its place in `dspark_target_layer_ids`; -1 if the drafter does not see it."""
        return self._places(self.dspark_target_layer_ids)

    def _places(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(ids.index(n) if n in ids else -1 for n in range(self.num_hidden_layers))

    @cached_property
    def source_ratios(self) -> tuple[int, ...]:
        """Tokens per row of each KV source."""
        return tuple(self.compress_ratios[layer] for layer in self.kv_source_layer_ids)

    @cached_property
    def pair_index(self) -> tuple[int, ...]:
        """Per KV source, its place among the paired ones; -1 if it takes every token."""
        paired = self.paired_sources
        return tuple(paired.index(i) if i in paired else -1 for i in range(len(self.source_ratios)))

    @cached_property
    def paired_sources(self) -> tuple[int, ...]:
        """Indices of the KV sources that compress two tokens into a row, gated and carried."""
        return tuple(i for i, ratio in enumerate(self.source_ratios) if ratio == 2)

    @property
    def engram_columns(self) -> int:
        """Table rows looked up per token and Engram layer: one per n-gram order and head."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def num_mixes(self) -> int:
        """Outputs of a hyper-connection projection: pre, post and combination weights."""
        return self.hc_mult * (2 + self.hc_mult)


_POSITIVE_INTS = (
    "vocab_size hidden_size moe_intermediate_size num_hidden_layers num_attention_heads head_dim "
    "qk_rope_head_dim q_lora_rank o_lora_rank o_groups max_position_embeddings n_routed_experts "
    "num_experts_per_tok sliding_window index_n_heads index_head_dim index_topk hc_mult "
    "hc_sinkhorn_iters candidate_topk_blocks candidate_block_size engram_max_ngram_size "
    "engram_vocab_size engram_n_heads engram_head_dim engram_compressed_vocab_size "
    "dspark_block_size dspark_markov_rank dspark_n_routed_experts dspark_num_experts_per_tok"
).split()
_POSITIVE_FLOATS = "swiglu_limit rms_norm_eps rope_theta compress_rope_theta hc_eps".split()
_INT_LISTS = (
    "compress_ratios kv_source_layer_ids index_source_layer_ids engram_layer_ids "
    "engram_num_embeddings dspark_target_layer_ids"
).split()
_FIXED_TEXT = {
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
}
_FIXED_QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}


class _Reader:
    """Takes typed fields out of one JSON section and collects what is wrong with them."""

    def __init__(self, data: Mapping[str, Any], section: str, problems: list[str]):
        self.data, self.section, self.problems = data, section, problems

    def fail(self, name: str, message: str) -> None:
        self.problems.append(f"{self.section}{name}: {message}")

    def get(self, name: str, kind: type | tuple[type, ...], what: str, default: Any) -> Any:
        if name not in self.data:
            self.fail(name, "missing")
            return default
        value = self.data[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self.fail(name, f"expected {what}, got {value!r}")
            return default
        return value

    def integer(self, name: str, low: int = 1) -> int:
        value: int = self.get(name, int, "an integer", low)
        if value < low:
            self.fail(name, f"expected an integer of at least {low}, got {value}")
            return low
        return value

    def number(self, name: str) -> float:
        value = float(self.get(name, (int, float), "a number", 1.0))
        if not 0 < value < float("inf"):
            self.fail(name, f"expected a finite positive number, got {value}")
            return 1.0
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        value = self.get(name, list, "a list of integers", [])
        if any(not isinstance(v, int) or isinstance(v, bool) or v < 0 for v in value):
            self.fail(name, f"expected a list of non-negative integers, got {value!r}")
            return ()
        return tuple(value)

    def fixed(self, expected: Mapping[str, Any]) -> None:
        for name, value in expected.items():
            found = self.data.get(name)
            if found != value or isinstance(found, bool) != isinstance(value, bool):
                self.fail(name, f"this implementation needs {value!r}, got {found!r}")

    def section_of(self, name: str) -> "_Reader":
        value = self.get(name, dict, "an object", {})
        return _Reader(value, f"{self.section}{name}.", self.problems)


def parse_config(data: Mapping[str, Any]) -> ModelConfig:
    """Builds a `ModelConfig` from the parsed official ``config.json``.

    A section may be absent where the network has no such part: ``vision_config`` null or missing
    (no vision tower), ``num_nextn_predict_layers`` 0 (no drafter), empty ``engram_layer_ids``.

    Raises:
      ConfigError: listing every missing, mistyped or inconsistent field by its path.
    """
    problems: list[str] = []
    top = _Reader(data, "", problems)
    text = top.section_of("text_config")
    top.section_of("quantization_config").fixed(_FIXED_QUANTIZATION)
    text.fixed(_FIXED_TEXT)
    fields: dict[str, Any] = {name: text.integer(name) for name in _POSITIVE_INTS}
    fields |= {name: text.number(name) for name in _POSITIVE_FLOATS}
    fields |= {name: text.integers(name) for name in _INT_LISTS}
    fields |= {
        name: top.integer(name, 0) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    fields["image_token_id"] = top.integer("image_token_id", 0)
    fields["norm_topk_prob"] = text.get("norm_topk_prob", bool, "true or false", True)
    fields["routed_scaling_factor"] = text.number("routed_scaling_factor")
    fields["num_nextn_predict_layers"] = text.integer("num_nextn_predict_layers", 0)
    fields["dspark_noise_token_id"] = text.integer("dspark_noise_token_id", 0)
    fields["engram_pad_token_id"] = text.integer("engram_pad_token_id", 0)
    candidate = text.data.get("candidate_source_layer_id")
    fields["candidate_source_layer_id"] = (
        None if candidate is None else text.integer("candidate_source_layer_id", 0)
    )
    fields["yarn"] = _parse_yarn(text.section_of("rope_scaling"))
    fields["vision"] = (
        None
        if data.get("vision_config") is None
        else _parse_vision(top.section_of("vision_config"))
    )
    config = ModelConfig(**fields)
    if not problems:
        problems += _inconsistencies(config)
    if problems:
        raise ConfigError("config.json cannot be used:\n" + "\n".join(f"  {p}" for p in problems))
    return config


def _parse_yarn(section: _Reader) -> YarnConfig:
    section.fixed({"rope_type": "yarn"})
    return YarnConfig(
        factor=section.number("factor"),
        beta_fast=section.number("beta_fast"),
        beta_slow=section.number("beta_slow"),
        original_max_position_embeddings=section.integer("original_max_position_embeddings"),
    )


def _parse_vision(section: _Reader) -> VisionConfig:
    integers = {
        field.name: section.integer(field.name)
        for field in dataclasses.fields(VisionConfig)
        if field.name not in ("rope_theta", "max_wh_ratio")
    }
    ratio = section.data.get("max_wh_ratio")
    return VisionConfig(
        **integers,
        rope_theta=section.number("rope_theta"),
        max_wh_ratio=None if ratio is None else section.number("max_wh_ratio"),
    )


def _inconsistencies(c: ModelConfig) -> list[str]:
    """Relations between fields, as messages that name the field."""
    checks = [*_attention_checks(c), *_source_checks(c), *_part_checks(c)]
    return [f"text_config.{name}: {message}" for ok, name, message in checks if not ok]


def _attention_checks(c: ModelConfig) -> list[tuple[bool, str, str]]:
    return [
        (c.hidden_size % FP8_BLOCK == 0, "hidden_size", f"not a multiple of {FP8_BLOCK}"),
        (c.q_lora_rank % FP8_BLOCK == 0, "q_lora_rank", f"not a multiple of {FP8_BLOCK}"),
        (
            c.moe_intermediate_size % FP8_BLOCK == 0,
            "moe_intermediate_size",
            f"not a multiple of {FP8_BLOCK}",
        ),
        (c.head_dim % FP8_BLOCK == 0, "head_dim", f"not a multiple of {FP8_BLOCK}"),
        (c.index_head_dim % FP8_BLOCK == 0, "index_head_dim", f"not a multiple of {FP8_BLOCK}"),
        (
            c.qk_rope_head_dim % 2 == 0 and c.qk_rope_head_dim <= min(c.head_dim, c.index_head_dim),
            "qk_rope_head_dim",
            "must be even and at most head_dim and index_head_dim",
        ),
        (c.num_attention_heads % c.o_groups == 0, "o_groups", "must divide num_attention_heads"),
        (
            c.o_groups * c.o_lora_rank % FP8_BLOCK == 0,
            "o_lora_rank",
            f"o_groups * o_lora_rank is not a multiple of {FP8_BLOCK}",
        ),
        (c.sliding_window % 2 == 0, "sliding_window", "must be even"),
        (
            c.num_experts_per_tok <= c.n_routed_experts,
            "num_experts_per_tok",
            "more than n_routed_experts",
        ),
        (
            c.max_position_embeddings <= 1 << 24,
            "max_position_embeddings",
            "above 2^24, where positions stop being exact in float32",
        ),
    ]


def _source_checks(c: ModelConfig) -> list[tuple[bool, str, str]]:
    n, ratios = c.num_hidden_layers, c.compress_ratios
    lengths_ok = len(ratios) == n + c.num_nextn_predict_layers
    if not lengths_ok:
        return [
            (
                False,
                "compress_ratios",
                f"needs one entry per layer and draft stage, {n + c.num_nextn_predict_layers}",
            )
        ]
    kv, index, cand = c.kv_source_layer_ids, c.index_source_layer_ids, c.candidate_source_layer_id
    readers = [layer for layer in range(n) if ratios[layer]]
    own = {layer: max((s for s in kv if s <= layer), default=None) for layer in readers}
    return [
        (
            set(ratios[:n]) <= {0, 1, 2} and not any(ratios[n:]),
            "compress_ratios",
            "layers take 0, 1 or 2 and draft stages 0",
        ),
        (_ascending(kv, n), "kv_source_layer_ids", "must be ascending layer numbers"),
        (_ascending(index, n), "index_source_layer_ids", "must be ascending layer numbers"),
        (
            all(ratios[s] for s in (*kv, *index) if s < n),
            "kv_source_layer_ids",
            "a source layer has compress_ratio 0",
        ),
        (set(kv) <= set(index), "index_source_layer_ids", "every KV source must also select"),
        (
            all(s is not None and ratios[s] == ratios[layer] for layer, s in own.items()),
            "compress_ratios",
            "a layer's ratio differs from that of the KV source it reads",
        ),
        (
            cand is None or (cand in index and ratios[cand] == 1),
            "candidate_source_layer_id",
            "must be an index source of ratio 1",
        ),
        (
            cand is None or all(i <= cand or own[i] == own[cand] for i in index),
            "candidate_source_layer_id",
            "later index sources must read the same KV source",
        ),
    ]


def _part_checks(c: ModelConfig) -> list[tuple[bool, str, str]]:
    n, boundary = c.num_hidden_layers, c.boundary_layer
    return [
        (_ascending(c.engram_layer_ids, n), "engram_layer_ids", "must be ascending layer numbers"),
        (c.engram_max_ngram_size >= 2, "engram_max_ngram_size", "must be at least 2"),
        (
            boundary is None or all(e < boundary for e in c.engram_layer_ids),
            "engram_layer_ids",
            "Engram layers must lie before the last KV source",
        ),
        (
            len(c.engram_num_embeddings) == len(c.engram_layer_ids),
            "engram_num_embeddings",
            "needs one entry per Engram layer",
        ),
        (c.engram_head_dim % FP8_BLOCK == 0, "engram_head_dim", f"not a multiple of {FP8_BLOCK}"),
        (
            c.engram_compressed_vocab_size <= c.vocab_size,
            "engram_compressed_vocab_size",
            "larger than vocab_size",
        ),
        (
            not c.num_nextn_predict_layers or len(c.dspark_target_layer_ids) > 0,
            "dspark_target_layer_ids",
            "a drafter needs at least one target layer",
        ),
        (
            _ascending(c.dspark_target_layer_ids, n),
            "dspark_target_layer_ids",
            "must be ascending layer numbers",
        ),
        (
            c.dspark_num_experts_per_tok <= c.dspark_n_routed_experts,
            "dspark_num_experts_per_tok",
            "more than dspark_n_routed_experts",
        ),
        *[
            (getattr(c, name) < c.vocab_size, name, "not below vocab_size")
            for name in ("dspark_noise_token_id", "engram_pad_token_id")
        ],
    ]


def _ascending(ids: tuple[int, ...], limit: int) -> bool:
    return list(ids) == sorted(set(ids)) and all(i < limit for i in ids)


def load_config(path: str | Path) -> ModelConfig:
    """Reads and validates a ``config.json``, given its path or the folder that holds it."""
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    return parse_config(read_json_object(path, MAX_CONFIG_BYTES))


def read_json_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """Reads one bounded JSON object from a file; raises `ConfigError` saying what is wrong."""
    try:
        with open(path, "rb") as file:
            raw = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if len(raw) > max_bytes:
        raise ConfigError(f"{path} is larger than {max_bytes} bytes")
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return data
