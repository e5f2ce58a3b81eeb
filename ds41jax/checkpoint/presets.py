"""Geometries of synthetic checkpoints, as contents of an official-layout `config.json`."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from ds41jax.config import FP8_BLOCK, ConfigError, ModelConfig, parse_config
from ds41jax.model.engram_hash import compressed_token_map, engram_primes
from ds41jax.tokenizer import (
    BOS,
    EOS,
    IMAGE,
    OFFICIAL_VOCAB_SIZE,
    PAD,
    SYSTEM,
    Tokenizer,
    byte_tokenizer,
)

SLICE_ENGRAM_BUCKETS = 10_007  # instead of 16 million: the official tables fill 203 GB
_OFFICIAL_COMPRESSED_VOCAB = 99_092
_OFFICIAL_IDS = {BOS: 0, EOS: 1, PAD: 2, SYSTEM: 128_799, IMAGE: 129_264}

_FIXED_TOP: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
}
_FIXED_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1_048_576,
    "rope_theta": 10_000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65_536,
    },
    "compress_rope_theta": 160_000,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_max_ngram_size": 4,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
}
_VISION: dict[str, Any] = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "patch_size": 14,
    "rope_theta": 10_000,
    "downsample_ratio": 3,
    "max_image_tokens": 64,
    "min_pixels": 1764,
    "max_wh_ratio": None,
}
_TINY_TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "o_groups": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [2, 4, 6],
    "index_source_layer_ids": [2, 4, 6, 8],
    "index_n_heads": 8,
    "index_head_dim": 64,
    "index_topk": 16,
    "candidate_source_layer_id": 6,
    "candidate_topk_blocks": 6,
    "candidate_block_size": 4,
    "engram_layer_ids": [1, 4],
    "engram_vocab_size": 101,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "dspark_target_layer_ids": [7, 8, 9],
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}
_SMALL_TEXT: dict[str, Any] = _TINY_TEXT | {
    "num_hidden_layers": 8,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "sliding_window": 32,
    "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [2, 4, 5],
    "index_source_layer_ids": [2, 4, 5, 7],
    "index_topk": 64,
    "candidate_source_layer_id": 5,
    "candidate_topk_blocks": 16,
    "candidate_block_size": 8,
    "engram_vocab_size": 4001,
    "dspark_target_layer_ids": [5, 6, 7],
    "dspark_n_routed_experts": 8,
}


_NANO_TEXT: dict[str, Any] = _SMALL_TEXT | {
    "hidden_size": 256,
    "moe_intermediate_size": 64,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "max_position_embeddings": 16_384,
    "sliding_window": 64,
    "index_n_heads": 4,
    "engram_layer_ids": [1, 3],
    "engram_vocab_size": 1009,
    "dspark_n_routed_experts": 8,
    "dspark_num_experts_per_tok": 2,
}


def tiny_config() -> dict[str, Any]:
    """10 narrow layers with every mechanism and a byte-level vocabulary of 512; about 5 MB."""
    tokenizer = byte_tokenizer(512)
    ids = {token: tokenizer.special_id(token) for token in _OFFICIAL_IDS}
    compressed = int(compressed_token_map(tokenizer).max()) + 1
    return _config_json(_TINY_TEXT, _VISION, 512, compressed, ids)


def small_config() -> dict[str, Any]:
    """8 narrow layers with every mechanism and the official vocabulary; below 100 MB."""
    vision = _VISION | {"max_image_tokens": 256}
    return _config_json(
        _SMALL_TEXT, vision, OFFICIAL_VOCAB_SIZE, _OFFICIAL_COMPRESSED_VOCAB, _OFFICIAL_IDS
    )


def nano_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The geometry of the trained nano model: 8 layers of width 256, 15 million weights."""
    ids = {token: tokenizer.special_id(token) for token in _OFFICIAL_IDS}
    compressed = int(compressed_token_map(tokenizer).max()) + 1
    return _config_json(_NANO_TEXT, _VISION, tokenizer.vocab_size, compressed, ids)


PRESETS = {"tiny": tiny_config, "small": small_config}


def _config_json(
    text: Mapping[str, Any],
    vision: Mapping[str, Any],
    vocab_size: int,
    compressed_vocab_size: int,
    ids: Mapping[str, int],
) -> dict[str, Any]:
    config = copy.deepcopy(_FIXED_TOP)
    config |= {"bos_token_id": ids[BOS], "eos_token_id": ids[EOS], "pad_token_id": ids[PAD]}
    config["image_token_id"] = ids[IMAGE]
    config["vision_config"] = dict(vision)
    config["text_config"] = copy.deepcopy(_FIXED_TEXT | dict(text)) | {
        "vocab_size": vocab_size,
        "engram_compressed_vocab_size": compressed_vocab_size,
        "engram_pad_token_id": ids[PAD],
        "dspark_noise_token_id": ids[SYSTEM],
    }
    _set_engram_rows(config["text_config"])
    return config


def _set_engram_rows(text: dict[str, Any]) -> None:
    primes = engram_primes(
        len(text["engram_layer_ids"]),
        text["engram_max_ngram_size"],
        text["engram_n_heads"],
        text["engram_vocab_size"],
    )
    text["engram_num_embeddings"] = primes.sum(axis=1).tolist()


def tokenizer_for(vocab_size: int) -> Tokenizer:
    """The official vocabulary if the size is its own, else a byte-level one."""
    if vocab_size == OFFICIAL_VOCAB_SIZE:
        return Tokenizer.from_vendor()
    return byte_tokenizer(vocab_size)


def slice_config(
    config_json: Mapping[str, Any],
    layers: Sequence[int],
    experts: int | None = None,
    draft_stages: int = 0,
    vision: bool = False,
    engram_buckets: int = SLICE_ENGRAM_BUCKETS,
) -> dict[str, Any]:
    """The geometry of some layers of a model, renumbered 0, 1, ...

    Args:
      config_json: contents of the model's `config.json`.
      layers: ascending layer numbers. Whatever they read must be among them: KV rows, index
        selections and candidate blocks of earlier layers.
      experts: routed experts to keep in each layer; None for all.
      draft_stages: draft stages to keep; they need one of the drafter's target layers.
      vision: keeps the vision tower.
      engram_buckets: least bucket size of the Engram tables, instead of the model's.

    Raises:
      ConfigError: naming the layer that the slice lacks, or the wrong argument.
    """
    model = parse_config(config_json)
    _check_slice(model, layers, draft_stages)
    new = {old: i for i, old in enumerate(layers)}
    sliced: dict[str, Any] = copy.deepcopy(dict(config_json))
    text = sliced["text_config"]

    def kept(ids: Sequence[int]) -> list[int]:
        return [new[i] for i in ids if i in new]

    text["num_hidden_layers"] = len(layers)
    text["compress_ratios"] = [model.compress_ratios[i] for i in layers] + [0] * draft_stages
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        text[name] = kept(getattr(model, name))
    candidates = model.candidate_source_layer_id
    text["candidate_source_layer_id"] = None if candidates is None else new.get(candidates)
    text["dspark_target_layer_ids"] = kept(model.dspark_target_layer_ids) if draft_stages else []
    text["num_nextn_predict_layers"] = draft_stages
    text["engram_vocab_size"] = engram_buckets
    _set_engram_rows(text)
    if experts is not None:
        if experts > model.n_routed_experts:
            raise ConfigError(f"experts: the model has {model.n_routed_experts}, not {experts}")
        _limit_experts(text, experts)
    if not vision:
        sliced["vision_config"] = None
    parse_config(sliced)
    return sliced


def _limit_experts(text: dict[str, Any], experts: int) -> None:
    for count, chosen in (
        ("n_routed_experts", "num_experts_per_tok"),
        ("dspark_n_routed_experts", "dspark_num_experts_per_tok"),
    ):
        text[count] = min(text[count], experts)
        text[chosen] = min(text[chosen], experts)


def _check_slice(model: ModelConfig, layers: Sequence[int], draft_stages: int) -> None:
    if not layers or list(layers) != sorted(set(layers)):
        raise ConfigError(f"layers must be ascending and distinct, got {list(layers)}")
    if layers[0] < 0 or layers[-1] >= model.num_hidden_layers:
        raise ConfigError(f"layers must lie in 0..{model.num_hidden_layers - 1}, got {layers}")
    missing = [
        f"layer {layer} needs {what} of layer {source}; add it to the slice"
        for layer in layers
        for source, what in _reads(model, layer).items()
        if source not in layers
    ]
    last = max((i for i in layers if i in model.kv_source_layer_ids), default=None)
    missing += [
        f"layer {layer} has Engram, which needs a later KV source; add layer {model.boundary_layer}"
        for layer in layers
        if last is not None and layer in model.engram_layer_ids and layer >= last
    ]
    if not 0 <= draft_stages <= model.num_nextn_predict_layers:
        missing.append(f"draft_stages must lie in 0..{model.num_nextn_predict_layers}")
    targets = model.dspark_target_layer_ids
    if draft_stages and not set(targets) & set(layers):
        missing.append(f"draft stages read layers {list(targets)}; add one to the slice")
    if missing:
        raise ConfigError("the slice is incomplete:\n" + "\n".join(f"  {m}" for m in missing))


def _reads(model: ModelConfig, layer: int) -> dict[int, str]:
    """Layers whose results `layer` reads, and what it reads of them."""
    if model.compress_ratios[layer] == 0:
        return {}
    selector = max(i for i in model.index_source_layer_ids if i <= layer)
    candidates = model.candidate_source_layer_id
    reads = {max(i for i in model.kv_source_layer_ids if i <= layer): "the KV rows"}
    if selector == layer and candidates is not None and candidates < layer:
        reads.setdefault(candidates, "the candidate blocks")
    reads.setdefault(selector, "the index selection")
    reads.pop(layer, None)
    return reads
