"""A thousand requests against a pool of a few pages, with cancellations: nothing may leak.

    python bench/pool_torture.py [--requests 1000]

The tiny checkpoint of the tests; the pool holds 4,096 tokens, as much as two of the longer
requests. Every request must end served, cancelled or refused; every page, slot and image must
balance after each step. Writes bench/results/pool_torture.json.
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import numpy as np
from tqdm import trange

from ds41jax import load_model
from ds41jax.cache.radix import Reuse
from ds41jax.engine.core import EngineCore
from ds41jax.engine.options import EngineOptions
from ds41jax.engine.request import Failed, Finished, Request
from ds41jax.engine.sampling import SamplingParams

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "pool_torture.json"
TINY = HERE.parent / "tests" / "golden" / "tiny"
OPTIONS = EngineOptions(
    max_active=4, context=4096, pool_tokens=4096, prefill_chunk=64, retained=4, reuse=Reuse.EXACT
)


def a_request(rng):
    """Short and long, greedy and seeded; some share prompts, some can never fit."""
    ids = np.random.default_rng(int(rng.integers(12))).integers(10, 500, int(rng.integers(1, 90)))
    tokens = int(rng.choice([2, 4, 900, 1900, 3900]))
    seed = int(rng.integers(5))
    sampling = SamplingParams(temperature=0.7, seed=seed) if seed else SamplingParams()
    return Request(tuple(ids.tolist()), tokens, sampling=sampling)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    args = parser.parse_args()
    core = EngineCore(load_model(TINY), OPTIONS)
    rng = np.random.default_rng(0)
    outcomes, running, start = [], [], time.perf_counter()
    for _ in trange(args.requests, desc="requests"):
        events = []
        sequence = core.preparer.sequence(a_request(rng), events.append)
        core.add(sequence)
        outcomes.append(events)
        running.append(sequence)
        for _ in range(rng.integers(4)):
            core.step()
            core.check()
        for other in running:
            other.cancelled |= other.request.max_tokens > 4 and rng.random() < 0.2
        running = [s for s in running if s.phase.value != "done"]
    for sequence in running:
        sequence.cancelled |= sequence.request.max_tokens > 4
    while core.step():
        core.check()
    ends = [events[-1] for events in outcomes]
    assert all(isinstance(e, Finished | Failed) for e in ends)
    kinds = Counter(e.reason if isinstance(e, Finished) else e.error.kind for e in ends)
    assert set(kinds) <= {"length", "stop", "cancelled", "capacity"}, kinds
    assert core.pool.free + core.cache.evictable_pages() == core.pool.size, "pages leaked"
    report = {
        "requests": args.requests,
        "outcomes": dict(kinds),
        "pool_pages": core.pool.size,
        "seconds": time.perf_counter() - start,
    }
    print(report)
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
