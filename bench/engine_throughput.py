"""tokens/s of the engine at concurrency 1, 4 and 16, drafted or not, beside the simple loop.

    python bench/engine_throughput.py [--model DIR] [--tokens 48]

Prints a table and writes bench/results/engine_throughput.json. Without --model: the tiny checkpoint
of the tests, whose drafter is accepted now and then.
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import time
from pathlib import Path

import jax
import numpy as np

from ds41jax import GenerateOptions, generate, load_model
from ds41jax.cache.radix import Reuse
from ds41jax.engine.core import EngineCore
from ds41jax.engine.options import EngineOptions
from ds41jax.engine.request import Request, Token

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "engine_throughput.json"
TINY = HERE.parent / "tests" / "golden" / "tiny"
PROMPT = 32
REPEATS = 3
OPTIONS = EngineOptions(context=512, pool_tokens=16384, prefill_chunk=64, reuse=Reuse.OFF)


def prompts(model, count, seed):
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(10, 500, PROMPT).tolist()) for _ in range(count)]


def simple_loop(model, tokens, dspark):
    """Decode tokens/s of the single-sequence loop."""
    options = GenerateOptions(max_tokens=tokens, dspark=dspark)
    runs = [generate(prompts(model, 1, 0)[0], model, options).progress for _ in range(REPEATS + 1)]
    return statistics.median((p.tokens - 1) / p.decode_seconds for p in runs[1:])


def engine(core, model, concurrency, tokens, seed):
    """Decode tokens/s of requests that run together: from the last first token to the end."""
    emitted = [[] for _ in range(concurrency)]
    for events, ids in zip(emitted, prompts(model, concurrency, seed), strict=True):
        request = Request(ids, tokens, ignore_eos=True)
        core.add(core.preparer.sequence(request, events.append))
    while not all(any(isinstance(e, Token) for e in events) for events in emitted):
        core.step()
    before = core.counters.emitted_tokens
    start = time.perf_counter()
    while core.step():
        pass
    return (core.counters.emitted_tokens - before) / (time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(TINY))
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    model = load_model(args.model)
    rows = {}
    for dspark in (False, True):
        rows[f"simple loop, drafts {dspark}"] = simple_loop(model, args.tokens, dspark)
        core = EngineCore(model, dataclasses.replace(OPTIONS, dspark=dspark))
        core.device.warm_up(True, True)
        for concurrency in (1, 4, 16):
            rates = [engine(core, model, concurrency, args.tokens, seed) for seed in range(REPEATS)]
            rows[f"engine, {concurrency} requests, drafts {dspark}"] = statistics.median(rates)
    for name, rate in rows.items():
        print(f"{name:<40}{rate:>10.1f} tokens/s")
    report = {
        "machine": f"{platform.machine()}, {jax.devices()[0].device_kind}, jax {jax.__version__}",
        "model": Path(args.model).name,
        "prompt_tokens": PROMPT,
        "tokens": args.tokens,
        "median_of": REPEATS,
        "load_average": os.getloadavg()[0],
        "tokens_per_second": rows,
    }
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
