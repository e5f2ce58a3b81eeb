"""The engine's face: threads, asyncio, limits, faults, and nothing growing after readiness."""

import asyncio
import gc
import threading
import time

import jax
import pytest
from engine_runs import alone, options, prompt, request
from oracle import tiny_model

from ds41jax.engine.engine import Engine, RequestHandle
from ds41jax.engine.request import EngineError, Failed, Finished, Started, Token


@pytest.fixture(scope="module")
def engine():
    made = Engine(tiny_model(), options(warm_up=True))
    yield made
    made.close()


def tokens(events):
    return [e.token_id for e in events if isinstance(e, Token)]


def live_bytes():
    """The least of a while: the loop thread holds its last round after the last event is out."""
    gc.collect()
    seen = []
    for _ in range(20):
        seen.append(sum(x.nbytes for x in jax.live_arrays()))
        time.sleep(0.02)
    return min(seen)


def test_nothing_grows_after_readiness(engine):
    requests = [request(prompt(i % 3, 5 + 7 * i), 6, seed=i % 2 or None) for i in range(8)]
    wanted = [alone(r) for r in requests]
    assert tokens(engine.submit(requests[0])) == wanted[0]
    live = live_bytes()
    for _ in range(2):
        handles = [engine.submit(r) for r in requests]
        assert [tokens(h) for h in handles] == wanted
    stats = engine.stats()
    assert stats.active == stats.waiting == 0 and stats.healthy
    assert live_bytes() == live


def test_ready_engines_compile_nothing():
    """In a fresh process, so that other tests' programs cannot hide a missing one."""
    import subprocess
    import sys
    from pathlib import Path

    script = """
import sys
sys.path.insert(0, sys.argv[1])
import conftest
from engine_runs import options, prompt, request
from oracle import tiny_model
from ds41jax.engine.engine import Engine
with Engine(tiny_model(), options(warm_up=True)) as engine:
    for _ in range(2):
        made = [request(prompt(i % 3, 5 + 9 * i), 6, seed=i % 2 or None, top_logprobs=i)
                for i in range(8)]
        for handle in [engine.submit(r) for r in made]:
            list(handle)
    for _ in range(2):  # the second time its prompt is found whole
        hit = list(engine.submit(made[3]))[0].cached_tokens
    assert hit == len(made[3].token_ids)
    print(engine.stats().compiled_after_ready)
"""
    tests = Path(__file__).parent
    result = subprocess.run(
        [sys.executable, "-c", script, str(tests)], capture_output=True, text=True, cwd=tests
    )
    assert result.stdout.strip() == "0", result.stderr[-2000:]


def test_one_call_into_the_loop_wakes_many_readers():
    """Events of one round cost one call; an event during a wake-up is not lost."""

    async def run():
        loop, calls = asyncio.get_running_loop(), []
        call = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: calls.append(args) or call(*args)
        handles = [RequestHandle(n, lambda: None) for n in range(16)]
        readers = [asyncio.create_task(_all(handle)) for handle in handles]
        for _ in range(3):
            await asyncio.sleep(0.01)
            for handle in handles:
                handle.put(Token(5))
        await asyncio.sleep(0.01)
        assert len(calls) == 3
        for handle in handles:
            handle.put(Finished("stop", 1, 3, 0, 0, 0))
        return await asyncio.gather(*readers)

    assert [len(events) for events in asyncio.run(run())] == [4] * 16


async def _all(handle):
    return [event async for event in handle]


def test_a_handle_whose_loop_is_closed_takes_events():
    handle = RequestHandle(0, lambda: None)

    async def leave():
        reader = aiter(handle)
        task = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(0)
        return reader, task

    loop = asyncio.new_event_loop()
    kept = loop.run_until_complete(leave())
    loop.close()
    handle.put(Token(5))
    assert handle.ready and len(kept) == 2


def test_asyncio_reads_many_at_once(engine):
    requests = [request(prompt(20 + i, 12), 5) for i in range(4)]

    async def read(r):
        return [event async for event in engine.submit(r)]

    async def together():
        return await asyncio.gather(*map(read, requests))

    assert [tokens(events) for events in asyncio.run(together())] == [alone(r) for r in requests]


def test_generate_waits_for_any_number_of_requests(engine):
    """More than may run and wait at once; in their order, with what they asked for."""
    requests = [request(prompt(i, 3 + i % 5), 2 + i % 3) for i in range(20)]
    assert len(requests) > engine.options.max_active + engine.options.max_queue
    outputs = engine.generate(requests)
    assert [list(o.token_ids) for o in outputs] == [alone(r) for r in requests]
    assert all(o.text is None and o.logprobs == () for o in outputs)
    (one,) = engine.generate([request(prompt(1, 9), 3, top_logprobs=2)])
    assert [len(entry.top) for entry in one.logprobs] == [2] * len(one.token_ids)
    assert one.finished.completion_tokens == len(one.token_ids)


def test_generate_raises_what_failed_and_cancels_the_rest(engine):
    before = engine.stats().totals["finished"].get("cancelled", 0)
    with pytest.raises(EngineError, match="pages") as caught:
        engine.generate([request(prompt(1, 1500), 2500), request(prompt(2, 9), 800)])
    assert caught.value.kind == "capacity"
    deadline = time.monotonic() + 60
    while engine.stats().active and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.stats().totals["finished"]["cancelled"] == before + 1


def test_a_stream_yields_events_and_cancels_when_it_is_left(engine):
    async def some(count):
        events = []
        async for event in engine.stream(request(prompt(32, 9), 300)):
            events.append(event)
            if len(events) == count:
                break
        return events

    events = asyncio.run(some(3))
    assert isinstance(events[0], Started) and all(isinstance(e, Token) for e in events[1:])
    deadline = time.monotonic() + 60
    while engine.stats().active and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not engine.stats().active


def test_leaving_early_cancels(engine):
    async def leave():
        async for event in engine.submit(request(prompt(30, 9), 200)):
            if isinstance(event, Token):
                break

    asyncio.run(leave())
    for event in engine.submit(request(prompt(31, 9), 200)):
        if isinstance(event, Token):
            break
    deadline = time.monotonic() + 60
    while engine.stats().active and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.stats().totals["finished"]["cancelled"] >= 2


def test_the_queue_is_bounded():
    with Engine(tiny_model(), options(max_queue=2)) as engine:
        handles = []
        with pytest.raises(EngineError) as caught:
            for i in range(50):
                handles.append(engine.submit(request(prompt(i, 60), 100)))
        assert caught.value.kind == "queue_full"
        assert 2 <= len(handles) <= 4 + 2 + 1
        for handle in handles:
            handle.cancel()
        assert all(isinstance(list(h)[-1], Finished) for h in handles)


def test_draining_lets_running_requests_finish():
    with Engine(tiny_model(), options()) as engine:
        handle = engine.submit(request(prompt(1, 20), 12))
        done = threading.Thread(target=engine.drain)
        done.start()
        while not engine.stats().draining:
            time.sleep(0.001)
        with pytest.raises(EngineError) as caught:
            engine.submit(request(prompt(2, 5), 2))
        assert caught.value.kind == "draining"
        assert tokens(handle) == alone(request(prompt(1, 20), 12))
        done.join()


def test_closing_fails_what_is_left():
    engine = Engine(tiny_model(), options())
    handle = engine.submit(request(prompt(1, 20), 400))
    engine.close()
    last = list(handle)[-1]
    assert isinstance(last, Failed) and last.error.kind == "closed"
    with pytest.raises(EngineError, match="stopped"):
        engine.submit(request(prompt(1, 5), 1))
    assert not engine.healthy


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_loop_is_unhealthy_and_tells_everybody(monkeypatch):
    engine = Engine(tiny_model(), options())
    monkeypatch.setattr(engine._core, "_decode", lambda: 1 / 0)
    handle = engine.submit(request(prompt(1, 20), 5))
    last = list(handle)[-1]
    assert isinstance(last, Failed) and last.error.kind == "internal"
    engine._thread.join()
    assert not engine.healthy and not engine.stats().healthy
    with pytest.raises(EngineError):
        engine.submit(request(prompt(1, 5), 1))
