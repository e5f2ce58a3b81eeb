"""Latency of one exchange with expert workers, worker compute excluded, and what it is made of.

Three times of one round trip, medians of many, each between pinned processes where there are
enough cores: `bare` is the transport alone (messages of the same sizes, no JAX), `exchange` is the
compiled program's send and wait with workers whose program echoes, `overhead` their difference. On
a GPU the program's send and wait are kernels, and the workers stay on the CPU.

    python bench/fabric_latency.py --out bench/results/fabric_latency.json
"""

import argparse
import multiprocessing
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ffi import ffi_call
from timing import write_results

from ds41jax.fabric.cuda import open_mailboxes
from ds41jax.fabric.library import (
    SOURCES,
    CoordinatorOptions,
    Event,
    Geometry,
    WorkerOptions,
    native,
)

D, E, K = 5120, 384, 6  # the released geometry
LAYERS = 40
MOST_ROWS = 8
CHAIN = 200  # exchanges a program
PROGRAMS = 10


def geometry() -> Geometry:
    return Geometry(
        hidden=D,
        experts=E,
        choices=K,
        groups=1,
        first_layer=0,
        last_layer=LAYERS,
        capacity=MOST_ROWS,
        placement=1,
    )


def pin(core: int) -> None:
    os.sched_setaffinity(0, {core % (os.cpu_count() or 1)})


def echo_worker(rank: int, transports: str, spin: bool, rows: int, pipe: Any) -> None:
    """A worker whose program answers with the codes it got, as numbers."""
    pin(1 + rank)
    library = native()
    options = WorkerOptions(geometry=geometry(), group=0, executor=1 + rank)
    session = library.open_worker(options, transports or None, spin)
    pipe.send(library.address(session, True))
    address, token = pipe.recv()
    library.call("admit", session, address, len(address), token)
    shapes = (
        jax.ShapeDtypeStruct((rows, D), jnp.uint8),
        jax.ShapeDtypeStruct((rows, D // 32), jnp.uint8),
        jax.ShapeDtypeStruct((rows, K), jnp.int32),
        jax.ShapeDtypeStruct((rows, K), jnp.float32),
        jax.ShapeDtypeStruct((2,), jnp.int32),
    )
    receive = ffi_call("ds41jax_expert_receive", shapes, has_side_effect=True)
    done = jax.ShapeDtypeStruct((), jnp.int32)
    respond = ffi_call("ds41jax_expert_respond", done, has_side_effect=True)

    @jax.jit
    def answer() -> jax.Array:
        def turn(last: jax.Array) -> jax.Array:
            codes, _, _, _, place = receive(
                last, session=np.int32(session), above=np.int32(0), timeout_ms=np.int32(20)
            )
            return respond(codes.astype(jnp.bfloat16), place, session=np.int32(session))

        return lax.while_loop(lambda place: place > 0, turn, jnp.int32(1))

    answer().block_until_ready()
    pipe.send("ready")
    while not pipe.poll():
        if library.handle.ds41jax_next_rows(session, 50):
            answer().block_until_ready()
    pipe.recv()
    pipe.send(library.timeline(session, True))


def exchanges(session: int, rows: int) -> Any:
    """A program of CHAIN exchanges, each fed by the one before."""
    send = ffi_call(
        "ds41jax_expert_send", jax.ShapeDtypeStruct((2,), jnp.uint32), has_side_effect=True
    )
    shapes = (jax.ShapeDtypeStruct((rows, D), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32))
    wait = ffi_call("ds41jax_expert_wait", shapes, has_side_effect=True)
    number = np.int32(session)

    @jax.jit
    def run(codes: jax.Array, scales: jax.Array, ids: jax.Array, weights: jax.Array) -> Any:
        def turn(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            codes, fault = carry
            numbers = jnp.stack([i % LAYERS, jnp.int32(rows), fault])
            ticket = send(codes, scales, ids, weights, numbers, session=number, source=np.int32(1))
            sums, fault = wait(ticket, jnp.int32(rows), scales, session=number)
            return sums.astype(jnp.uint8), fault

        return lax.fori_loop(0, CHAIN, turn, (codes, jnp.int32(0)))

    return run


def time_programs(session: int, rows: int) -> list[float]:
    """Microseconds an exchange, one number a program; the first one, which compiles, left out."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 120, (rows, D), np.uint8)
    scales = np.full((rows, D // 32), 127, np.uint8)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(rows)]).astype(np.int32)
    weights = np.ones((rows, K), np.float32)
    run = exchanges(session, rows)
    times = []
    for _ in range(1 + PROGRAMS):
        start = time.perf_counter()
        out, fault = run(codes, scales, ids, weights)
        out.block_until_ready()
        times.append((time.perf_counter() - start) * 1e6 / CHAIN)
        if int(fault):
            raise RuntimeError(f"an exchange failed: {native().text('fault', session, int(fault))}")
    return times[1:]


def parts(here: np.ndarray, there: np.ndarray) -> dict[str, float]:
    """Median microseconds of what an exchange with one rank is made of, from both timelines."""

    def moments(of: np.ndarray, event: Event) -> dict[int, int]:
        return {int(m["wave"]): int(m["nanoseconds"]) for m in of[of["event"] == event]}

    sent, summed = moments(here, Event.SENT), moments(here, Event.SUMMED)
    received, answered = moments(there, Event.RECEIVED), moments(there, Event.ANSWERED)
    waves = sorted(set(sent) & set(summed) & set(received) & set(answered))
    spans = {
        "there": [received[w] - sent[w] for w in waves],
        "worker's program": [answered[w] - received[w] for w in waves],
        "back": [summed[w] - answered[w] for w in waves],
        "coordinator's program": [sent[w + 1] - summed[w] for w in waves if w + 1 in sent],
    }
    return {name: statistics.median(span) / 1e3 for name, span in spans.items()}


def measure_exchange(
    ranks: int, transports: str, spin: bool, rows: int
) -> tuple[list[float], dict[str, float]]:
    """Microseconds an exchange, one number a program; and of what they are made with one rank."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(ranks):
        mine, theirs = context.Pipe()
        arguments = (rank, transports, spin, rows, theirs)
        process = context.Process(target=echo_worker, args=arguments, daemon=True)
        with mock.patch.dict(os.environ, JAX_PLATFORMS="cpu"):
            process.start()
        pipes.append(mine)
        processes.append(process)
    library = native()
    options = CoordinatorOptions(
        geometry=geometry(),
        ranks=ranks,
        executor=1,
        balanced=True,
        checksum=False,
        deadline_ms=10_000,
    )
    session = library.open_coordinator(options, transports or None, spin)
    (device,) = jax.local_devices()[:1]
    if device.platform == "gpu":
        architecture = str(device.compute_capability).replace(".", "")
        open_mailboxes(library, session, options, architecture)
    address = library.address(session, False)
    try:
        for rank, pipe in enumerate(pipes):
            theirs = pipe.recv()
            pipe.send((address, 1000 + rank))
            assert pipe.recv() == "ready"
            library.call("attach", session, rank, theirs, len(theirs), 1000 + rank)
        times = time_programs(session, rows)
        timeline = library.timeline(session, False)
    finally:
        for pipe in pipes:
            pipe.send("end")
        there = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join(5)
        library.handle.ds41jax_close_mailboxes(session)
        library.handle.ds41jax_close_coordinator(session)
    return times, parts(timeline, there[0])


def measure_bare(program: Path, transports: str, spin: bool, rows: int) -> float:
    """Median microseconds of the transport alone."""
    out, back = 96 + rows * 5392, 96 + rows * 2 * D
    command = [str(program), str(native().ucx.library), transports, str(int(spin))]
    done = subprocess.run(
        [*command, str(out), str(back), "2000"],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return statistics.median(map(float, done.stdout.split()))


def build_bare(folder: Path) -> Path:
    program = folder / "pingpong"
    source = Path(__file__).parent / "native" / "pingpong.cc"
    command = ["g++", "-std=c++17", "-O3", "-w", f"-I{SOURCES}", f"-I{native().ucx.include}"]
    command += [str(source), str(SOURCES / "hub.cc"), "-ldl", "-lpthread", "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pin(0)
    load = os.getloadavg()
    print(f"load {load[0]:.2f}, {os.cpu_count()} cores")
    print(f"{'transport':<22}{'rows':>5}{'ranks':>6}{'bare us':>9}{'exchange us':>13}{'over':>7}")
    records: list[dict[str, Any]] = []
    cells = [
        (n, t, s) for n, t in (("shared memory", "sm,self"), ("tcp", "tcp,self")) for s in (0, 1)
    ]
    with tempfile.TemporaryDirectory() as folder:
        program = build_bare(Path(folder))
        for name, transports, spin in cells:
            for rows in (1, 6):
                bare = measure_bare(program, transports, bool(spin), rows)
                for ranks in (1, 4):
                    if spin and ranks >= (os.cpu_count() or 1):
                        continue  # processes that spin would fight for the cores
                    times, spans = measure_exchange(ranks, transports, bool(spin), rows)
                    found = statistics.median(times)
                    label = f"{name}, {'spin' if spin else 'sleep'}"
                    over = f"{found - bare:>7.1f}" if ranks == 1 else f"{'':>7}"
                    print(f"{label:<22}{rows:>5}{ranks:>6}{bare:>9.1f}{found:>13.1f}{over}")
                    if ranks == 1:
                        print("   ", ", ".join(f"{name} {us:.1f}" for name, us in spans.items()))
                    records.append(
                        {
                            "transport": name,
                            "spin": bool(spin),
                            "rows": rows,
                            "ranks": ranks,
                            "bare_us": bare,
                            "exchange_us": times,
                            "parts_us": spans if ranks == 1 else None,
                        }
                    )
    if args.out:
        write_results(args.out, records, load=load, cores=os.cpu_count(), exchanges=CHAIN)


if __name__ == "__main__":
    main()
