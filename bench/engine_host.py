"""Host time of a 16-wide decode round, apart from the model's own step.

    python bench/engine_host.py

The device's verify and select are replaced by recorded arrays, so what is timed is the scheduler,
the drafting policy, the batch, the events and the detokenisation. Prints a table and writes
bench/results/engine_host.json.
"""

import cProfile
import json
import os
import platform
import pstats
import statistics
import time
from pathlib import Path

import jax
import numpy as np

from ds41jax import load_model
from ds41jax.cache.radix import Reuse
from ds41jax.drafting.registry import make_policy
from ds41jax.engine.core import EngineCore
from ds41jax.engine.options import EngineOptions
from ds41jax.engine.request import Request, Token
from ds41jax.engine.selection import Outcome
from ds41jax.tokenizer import StreamDecoder, Tokenizer

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "engine_host.json"
TINY = HERE.parent / "tests" / "golden" / "tiny"
WIDTH, ROUNDS = 16, 300


def recorded_outcome(rows, width, block):
    rng = np.random.default_rng(0)
    return Outcome(
        tokens=rng.integers(10, 500, rows).astype(np.int32),
        agreed=rng.integers(0, 3, width).astype(np.int32),
        logprobs=np.zeros(rows, np.float32),
        top_ids=np.zeros((rows, 20), np.int32),
        top_logprobs=np.zeros((rows, 20), np.float32),
        draft_ids=rng.integers(10, 500, (width, block)).astype(np.int32),
        confidence=rng.normal(size=(width, block)).astype(np.float32),
    )


def measure(model, policy):
    """Median microseconds of a round of WIDTH requests, batch building included, and a profile."""
    options = EngineOptions(
        context=4096, pool_tokens=131072, reuse=Reuse.OFF, policy=make_policy(policy, limit=5)
    )
    core = EngineCore(model, options)
    decoders = [StreamDecoder(Tokenizer.from_vendor()) for _ in range(1)] * WIDTH
    text = []

    def reader(decoder):
        return lambda e: text.append(decoder.push(e.token_id)) if isinstance(e, Token) else None

    rows = WIDTH * (1 + core.block)
    outcome = recorded_outcome(rows, WIDTH, core.block)
    core.device.verify = lambda batch: None

    def select(logits, choices):
        counts = np.maximum(choices.counts - 1, 0)
        return outcome.replace(agreed=np.minimum(outcome.agreed[: len(counts)], counts))

    core.device.select = select
    core.device.encode = lambda batch: None
    core.device.feed_suffix = lambda batch: jax.numpy.zeros((1, model.config.vocab_size))
    for i in range(WIDTH):
        request = Request((10 + i,), 3000, ignore_eos=True)
        core.add(core.preparer.sequence(request, reader(decoders[i])))
    while any(s.phase.value != "decode" for s in core.active) or len(core.active) < WIDTH:
        core.step()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        core.step()
        times.append((time.perf_counter() - start) * 1e6)
    profile = cProfile.Profile()
    profile.runcall(lambda: [core.step() for _ in range(50)])
    return statistics.median(times), profile


def main():
    model = load_model(TINY, progress=False)
    report = {"machine": f"{platform.machine()}, jax {jax.__version__}", "requests": WIDTH}
    report["load_average"] = os.getloadavg()[0]
    for policy in ("fixed", "threshold", "balance"):
        median, profile = measure(model, policy)
        print(f"{policy:<12}{median:>8.0f} us a round of {WIDTH} requests")
        report[policy] = {"median_us": median, "rounds": ROUNDS}
    pstats.Stats(profile).sort_stats("cumulative").print_stats(18)
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
