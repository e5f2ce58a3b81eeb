"""Timing on a GPU, random data, and the record that a bench writes."""

import collections
import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ds41jax.formats import Format, QuantizedArray


def device_seconds(
    run: Callable[..., Any], args: Sequence[Any], repeats: int, turns: int = 1, rounds: int = 5
) -> float:
    """Median seconds of one of `repeats` calls that one compiled program holds.

    Args:
      run: builds call i of (i, *args). Calls must differ (other weights, other rows), else XLA
        merges them, and their data must exceed the cache together: i is i + repeats * turn, traced.
      args: arrays; captured ones would become constants of the program.
      repeats: calls a program.
      turns: programs queued one after the other, with different i.
      rounds: times that those are timed.
    """
    program = jax.jit(lambda turn, *args: [run(turn * repeats + i, *args) for i in range(repeats)])
    inputs = [(jnp.int32(turn), *args) for turn in range(turns)]
    compiled = program.lower(*inputs[0]).compile()
    return compiled_seconds(compiled, inputs, rounds) / repeats


def compiled_seconds(program: Any, inputs: Sequence[Sequence[Any]], rounds: int = 5) -> float:
    """Median seconds of a compiled program, queued several times so that dispatch is hidden."""
    jax.block_until_ready([program(*args) for args in inputs])
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(3):
            out = [program(*args) for args in inputs]
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / (3 * len(inputs)))
    return statistics.median(times)


@jax.jit
def _flush(x: jax.Array) -> jax.Array:
    return x ^ jnp.uint32(1)


def kernel_times(run: Callable[[], Any], calls: int = 3) -> dict[str, tuple[int, float]]:
    """For every kernel of a call, as the device's trace names it: (launches, median us).

    Before each call a pass over 256 MB, whose own kernel is left out, empties the cache.
    """
    x = jnp.zeros(1 << 26, jnp.uint32)
    jax.block_until_ready((run(), _flush(x)))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([(_flush(x), run()) for _ in range(calls)])
        (trace,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(trace)).planes
        times: dict[str, list[float]] = collections.defaultdict(list)
        for line in (line for p in planes if "GPU" in p.name for line in p.lines):
            if "Stream" in line.name:
                for event in (e for e in line.events if "xor" not in e.name):
                    times[event.name].append(event.duration_ns / 1e3)
    found = {k: (len(v) // calls, round(statistics.median(v), 2)) for k, v in times.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1][0] * item[1][1]))


def copy_bandwidth(gigabytes: int = 4) -> float:
    """Bytes a second that a large copy reads and writes."""
    x = jax.random.bits(jax.random.key(0), (gigabytes << 28,), jnp.uint32)
    copy = jax.jit(lambda x: x ^ jnp.uint32(1)).lower(x).compile()
    return 2 * x.nbytes / compiled_seconds(copy, [(x,)])


def matmul_rate(n: int = 8192) -> float:
    """FLOP/s of a large bfloat16 product."""
    a, b = jax.random.normal(jax.random.key(0), (2, n, n), jnp.bfloat16)
    product = jax.jit(jnp.matmul).lower(a, b).compile()
    return 2 * n**3 / compiled_seconds(product, [(a, b)])


def random_weight(seed: int, shape: tuple[int, ...], format: Format) -> QuantizedArray:
    """Random codes of moderate size and scales around 2^-7, made on the device."""
    *lead, rows, columns = shape

    @jax.jit
    def make() -> tuple[jax.Array, jax.Array]:
        key, other = jax.random.split(jax.random.key(seed))
        if format is Format.MXFP4:
            codes = jax.random.bits(key, (*lead, rows, columns // 2), jnp.uint8)
            scale_shape = (*lead, rows, columns // 32)
        else:
            bits = jax.random.bits(key, shape, jnp.uint8)
            bits = (bits & 0x80) | (0x28 + (bits & 0x1F))
            codes = jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn)
            scale_shape = (*lead, rows // 32, columns // 32)
        return codes, jnp.uint8(119) + jax.random.bits(other, scale_shape, jnp.uint8) % 3

    return QuantizedArray(*make(), format=format)


def relative_error(a: jax.Array, b: jax.Array) -> float:
    """|a - b| / |b| over all elements; a NaN never passes as small."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


def write_results(path: Path, records: list[dict[str, Any]], **facts: Any) -> None:
    """Writes the records with device, versions and date."""
    device = jax.devices()[0]
    head = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        **facts,
    }
    path.write_text(json.dumps({**head, "records": records}, indent=1) + "\n")
