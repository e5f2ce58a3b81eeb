"""Compile time, tokens/s and peak memory of the single-sequence loop.

    python bench/simple_loop.py [--model DIR] [--tokens 64] [--prompt 256]

Prints a table and writes bench/results/simple_loop.json. Without --model: the small default
checkpoint, whose random weights accept hardly any draft, so drafting costs and does not pay here.
"""

import argparse
import json
import platform
import resource
import statistics
import time
from pathlib import Path

import jax
import numpy as np

from ds41jax import GenerateOptions, generate
from ds41jax.engine.generate import resolve_model

REPEATS = 3
RESULTS = Path(__file__).parent / "results" / "simple_loop.json"


def measure(model, prompt, options):
    """First (compiling) and later runs of one setting."""
    start = time.perf_counter()
    generate(prompt, model, options)
    first = time.perf_counter() - start
    later = [generate(prompt, model, options).progress for _ in range(REPEATS)]
    decode = statistics.median((p.tokens - 1) / p.decode_seconds for p in later)
    prefill = statistics.median(p.prompt_tokens / p.prefill_seconds for p in later)
    whole = statistics.median(p.prefill_seconds + p.decode_seconds for p in later)
    return {
        "first_run_seconds": first,
        "compile_seconds": first - whole,
        "prefill_tokens_per_second": prefill,
        "decode_tokens_per_second": decode,
        "drafts_accepted": later[0].accepted,
        "drafts_verified": later[0].drafted,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=256)
    args = parser.parse_args()
    model = resolve_model(args.model)
    prompt = np.random.default_rng(0).integers(3, model.config.vocab_size - 1000, args.prompt)
    rows = {}
    for name, dspark, bounded in (
        ("no drafts, exact prefill", False, False),
        ("no drafts, bounded prefill", False, True),
        ("drafts, bounded prefill", True, True),
    ):
        options = GenerateOptions(max_tokens=args.tokens, dspark=dspark, bounded=bounded)
        rows[name] = measure(model, prompt.tolist(), options)
        print(name, {k: round(v, 1) for k, v in rows[name].items()}, flush=True)
    report = {
        "machine": f"{platform.machine()}, {jax.devices()[0].device_kind}, jax {jax.__version__}",
        "model": str(model.path.name),
        "weights_bytes": sum(x.nbytes for x in jax.tree.leaves(model.params)),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "prompt_tokens": args.prompt,
        "tokens": args.tokens,
        "median_of": REPEATS,
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    print(f"peak memory {report['peak_memory_bytes'] / 1e6:.0f} MB; written to {RESULTS}")


if __name__ == "__main__":
    main()
