"""A short soak on the real engine; `bench/serving_soak.py` has the long one."""

import dataclasses
import importlib.util
import sys
from pathlib import Path

from ds41jax.engine.engine import Engine
from ds41jax.engine.loading import Model

BENCH = Path(__file__).parents[2] / "bench" / "serving_soak.py"


def test_soak(text_model: Model) -> None:
    spec = importlib.util.spec_from_file_location("serving_soak", BENCH)
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    sys.modules["serving_soak"] = bench
    spec.loader.exec_module(bench)
    options = dataclasses.replace(bench.OPTIONS, max_active=2, max_queue=2, dspark=False)
    with Engine(text_model, options) as engine:
        tally, stats = bench.soak(engine, bench.requests()[:6], clients=8, seconds=8)
    assert bench.faults(tally, stats) == []
    assert tally.left
