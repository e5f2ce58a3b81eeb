"""The options of `ds41jax serve`, on the command line or in a TOML file."""

import argparse
import importlib.util
import json
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds41jax import compute_arguments
from ds41jax.cache.planner import state_bytes
from ds41jax.cache.pool import PageLayout
from ds41jax.cache.radix import Reuse
from ds41jax.card_arguments import add_card_arguments, split_parts
from ds41jax.config import ModelConfig
from ds41jax.drafting.registry import POLICIES, make_policy
from ds41jax.engine import remote_options
from ds41jax.engine.options import MAX_ACTIVE, EngineOptions
from ds41jax.model.state import PAGE_ROWS
from ds41jax.plan_command import size_in_bytes
from ds41jax.serving.server import (
    ALIASES,
    MAX_OUTPUT_TOKENS,
    MODEL_NAME,
    NANO_NAME,
    ServerOptions,
)
from ds41jax.serving.settings import SamplingDefaults

KEY_VARIABLE = "DS41JAX_API_KEY"
DEFAULT_CONTEXT = 16384
DEFAULT_CACHE_TOKENS = 65536
POOL_MARGIN = 64  # rows of drafts and of unfinished pages, which a request needs besides
MAX_CONFIG_BYTES = 1 << 20
MAX_KEY_BYTES = 4096


class ConfigFile(argparse.Action):
    """Takes options from a TOML file, at its place among the arguments: later ones win."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        try:
            arguments = _file_arguments(Path(str(values)))
        except (OSError, ValueError) as error:
            parser.error(f"--config {values}: {error}")
        parser.parse_args(arguments, namespace)


def _file_arguments(path: Path) -> list[str]:
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError(f"the file is larger than {MAX_CONFIG_BYTES} bytes")
    arguments: list[str] = []
    for key, value in tomllib.loads(path.read_text("utf-8")).items():
        if isinstance(value, bool):
            arguments.append(f"--{key}" if value else f"--no-{key}")
        elif isinstance(value, list):
            arguments += [f"--{key}={item}" for item in value]
        elif isinstance(value, dict):
            raise ValueError(f"{key}: tables are not used here")
        else:
            arguments.append(f"--{key}={value}")
    return arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    add = parser.add_argument
    add("--config", metavar="FILE", action=ConfigFile, help="options as TOML; later ones win")
    add("--model", metavar="DIR", help="checkpoint; the built-in nano model if left out")
    add("--listen", metavar="HOST:PORT", default="0.0.0.0:8000", help="default: %(default)s")
    add("--dry-run", action="store_true", help="print the plan and every check, then stop")
    _add_engine_arguments(parser.add_argument_group("engine"))
    _add_host_arguments(parser.add_argument_group("prefixes in host memory"))
    _add_server_arguments(parser.add_argument_group("requests"))
    remote_options.add_arguments(parser.add_argument_group("experts on other machines"))


def _add_engine_arguments(group: argparse._ArgumentGroup) -> None:
    add, switch = group.add_argument, argparse.BooleanOptionalAction
    add("--concurrency", type=_whole(1, MAX_ACTIVE), default=MAX_ACTIVE, metavar="N")
    add("--kv-pool-tokens", type=_whole(1, 1 << 40), metavar="N", help="default: 65536")
    add("--kv-pool-size", type=size_in_bytes, metavar="SIZE", help="the same in bytes")
    add("--prefix-cache-entries", type=_whole(0, 128), default=20, metavar="N")
    add("--prefix-reuse", choices=[mode.value for mode in Reuse], default=Reuse.BOUNDED.value)
    add("--max-context-tokens", type=_whole(2, 1 << 24), metavar="N")
    add("--max-output-tokens", type=_whole(1, MAX_OUTPUT_TOKENS), default=MAX_OUTPUT_TOKENS)
    add("--prefill-batch-tokens", type=_whole(1, 4096), default=256, metavar="N")
    add("--prefill", choices=("bounded", "exact"), default="bounded")
    add("--dspark", action=switch, default=True, help="draft and verify; same output")
    add("--dspark-policy", choices=sorted(POLICIES), default="fixed")
    add("--dspark-fixed", action="store_const", dest="dspark_policy", const="fixed")
    add("--dspark-draft-limit", type=_whole(1, 7), default=5, metavar="N")
    add_card_arguments(group)
    add("--warm-up", action=switch, default=True, help="compile before the first request")
    compute_arguments.add_arguments(group)
    add("--memory-reservation", type=size_in_bytes, metavar="SIZE", help="for the plan")


def _add_host_arguments(group: argparse._ArgumentGroup) -> None:
    add, milliseconds = group.add_argument, _whole(0, 3_600_000)
    add("--host-cache-entries", type=_whole(0, 4096), metavar="N", help="default: none")
    add("--host-cache-tokens", type=_whole(1, 1 << 40), metavar="N", help="default: 65536")
    add("--host-cache-bytes", type=size_in_bytes, metavar="SIZE", help="the same in bytes")
    add("--host-cache-min-tokens", type=_whole(0, 1 << 24), metavar="N", help="default: the window")
    add("--host-cache-max-tokens", type=_whole(1, 1 << 24), metavar="N")
    add("--host-cache-store", choices=("on-retain", "on-evict"), default="on-retain")
    add("--host-cache-copy-budget-ms", type=milliseconds, default=1000, metavar="MS")
    add("--host-cache-restore-budget-ms", type=milliseconds, default=500, metavar="MS")
    add("--host-cache-store-pace-ms", type=milliseconds, default=0, metavar="MS")


def _add_server_arguments(group: argparse._ArgumentGroup) -> None:
    add, switch = group.add_argument, argparse.BooleanOptionalAction
    add("--http-queue-depth", type=_whole(1, 4096), metavar="N", help="default: concurrency")
    add("--http-queue-wait-ms", type=_whole(0, 3_600_000), default=25_000, metavar="MS")
    add("--model-name", metavar="ID", help=f"{MODEL_NAME} unless it is the built-in model")
    add("--alias", action="append", default=[], metavar="ID", help="another name for the model")
    add("--greedy", action=switch, default=False, help="temperature 0 where none is asked for")
    add("--api-key-file", type=Path, metavar="FILE", help=f"or the variable {KEY_VARIABLE}")
    add("--private-image-urls", action=switch, default=False, help="fetch from private addresses")
    add("--console-text", action=switch, default=False, help="the console shows what is written")
    add("--drain-seconds", type=_whole(0, 86_400), default=600, metavar="S")


def _whole(least: int, most: int) -> Any:
    def parse(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not from {least} to {most}")
        return value

    parse.__name__ = "whole number"  # argparse names the type in its message
    return parse


def engine_options(args: argparse.Namespace, config: ModelConfig) -> EngineOptions:
    """The engine's part of the arguments; raises `ValueError`."""
    context = args.max_context_tokens or min(config.max_position_embeddings, DEFAULT_CONTEXT)
    entries = args.host_cache_entries
    if entries is None:
        entries = 2 * args.prefix_cache_entries if args.host_cache_bytes is not None else 0
    options = EngineOptions(
        max_active=args.concurrency,
        max_queue=args.http_queue_depth or args.concurrency,
        context=context,
        pool_tokens=_tokens(config, "kv-pool", args.kv_pool_tokens, args.kv_pool_size),
        prefill_chunk=args.prefill_batch_tokens,
        bounded=args.prefill == "bounded",
        dspark=args.dspark,
        policy=make_policy(args.dspark_policy, limit=args.dspark_draft_limit),
        reuse=Reuse(args.prefix_reuse),
        retained=args.prefix_cache_entries,
        host_snapshots=entries,
        host_tokens=_tokens(config, "host-cache", args.host_cache_tokens, args.host_cache_bytes),
        host_min_tokens=args.host_cache_min_tokens,
        host_max_tokens=args.host_cache_max_tokens,
        host_write_behind=args.host_cache_store == "on-retain",
        host_evict_seconds=args.host_cache_copy_budget_ms / 1000,
        host_restore_seconds=args.host_cache_restore_budget_ms / 1000,
        host_pace_seconds=args.host_cache_store_pace_ms / 1000,
        warm_up=args.warm_up,
        compute=compute_arguments.compute_of(args),
        cards=args.cards,
        split=split_parts(args),
    )
    options.check(config)
    return options


def _tokens(config: ModelConfig, name: str, tokens: int | None, size: int | None) -> int:
    """Tokens of a cache that was sized in tokens, in bytes or not at all."""
    if size is None:
        return DEFAULT_CACHE_TOKENS if tokens is None else tokens
    if tokens is not None:
        raise ValueError(f"--{name}-tokens and a size in bytes: give one of them")
    layout = PageLayout(config.source_ratios, PAGE_ROWS)
    group = layout.group_pages * state_bytes(config)[1]
    if size < group:
        raise ValueError(f"--{name}: {size} bytes are less than the smallest unit, {group}")
    return size // group * layout.group_tokens


def server_options(
    args: argparse.Namespace, engine: EngineOptions, folder: Path, speculative: bool
) -> ServerOptions:
    """The server's part of the arguments; raises `ValueError` or `OSError`."""
    name = args.model_name or (MODEL_NAME if args.model else NANO_NAME)
    name, *aliases = dict.fromkeys([name, MODEL_NAME, *ALIASES, *args.alias])
    return ServerOptions(
        model_name=name,
        aliases=tuple(aliases),
        context=min(engine.context, engine.pool_tokens - POOL_MARGIN),
        max_output_tokens=args.max_output_tokens,
        sampling=SamplingDefaults(temperature=0.0) if args.greedy else generation_config(folder),
        queue_depth=args.http_queue_depth or args.concurrency,
        queue_wait_seconds=args.http_queue_wait_ms / 1000,
        api_key=read_key(args.api_key_file),
        private_urls=args.private_image_urls,
        console_text=args.console_text,
        speculative=speculative,
        guided=importlib.util.find_spec("xgrammar") is not None,
    )


def read_key(file: Path | None) -> str | None:
    """The API key, from a file or the environment; raises `ValueError` for an empty one."""
    if file is not None:
        with open(file, "rb") as handle:
            key = handle.read(MAX_KEY_BYTES).decode("utf-8").strip()
        if not key:
            raise ValueError(f"--api-key-file {file}: the file is empty")
        return key
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if KEY_VARIABLE in os.environ and not key:
        raise ValueError(f"{KEY_VARIABLE} is set but empty; unset it for a server without a key")
    return key or None


def generation_config(folder: Path) -> SamplingDefaults:
    """The checkpoint's own sampling, or temperature 1; raises `ValueError` for a bad file."""
    file = folder / "generation_config.json"
    if not file.exists():
        return SamplingDefaults()
    try:
        data = json.loads(file.read_bytes()[:MAX_CONFIG_BYTES])
        if not data.get("do_sample", True):
            return SamplingDefaults(temperature=0.0)
        defaults = SamplingDefaults(
            temperature=float(data.get("temperature", 1.0)),
            top_p=float(data.get("top_p", 1.0)),
            top_k=int(data.get("top_k") or 0),
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: {error}") from error
    if not (0 <= defaults.temperature <= 2 and 0 < defaults.top_p <= 1 and defaults.top_k >= 0):
        raise ValueError(f"{file}: temperature, top_p or top_k is out of range")
    return defaults
