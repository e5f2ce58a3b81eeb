"""`Engine`: many requests, one model, one loop thread; all that serving and scripts need."""

import asyncio
import dataclasses
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing

from ds41jax.engine.compile_counter import compilations
from ds41jax.engine.core import EngineCore
from ds41jax.engine.loading import Model
from ds41jax.engine.observer import Observer
from ds41jax.engine.options import EngineOptions
from ds41jax.engine.outputs import Output, gather
from ds41jax.engine.request import EngineError, Event, Failed, Finished, Request
from ds41jax.engine.sequence import Sequence
from ds41jax.engine.stats import EngineStats
from ds41jax.engine.wakeups import waker_of

LAST_EVENTS = (Finished, Failed)


class RequestHandle:
    """A submitted request: an iterator of its events, blocking or asynchronous, for one reader.

    Closing an iterator before its end cancels the request.
    """

    def __init__(self, number: int, cancel: Callable[[], None]):
        self.id = f"request-{number}"
        self._cancel = cancel
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._waker: Callable[[], None] | None = None

    def put(self, event: Event) -> None:
        """Takes an event from the engine; never blocks."""
        self._events.put(event)
        waker = self._waker
        if waker is not None:
            waker()

    @property
    def ready(self) -> bool:
        """Whether the next event can be read without waiting."""
        return not self._events.empty()

    def cancel(self) -> None:
        """Asks for the request to end at the next round; its last event tells."""
        self._cancel()

    def __iter__(self) -> Iterator[Event]:
        ended = False
        try:
            while not ended:
                event = self._events.get()
                ended = isinstance(event, LAST_EVENTS)
                yield event
        finally:
            if not ended:
                self.cancel()

    async def __aiter__(self) -> AsyncGenerator[Event, None]:
        ready = asyncio.Event()
        waker = waker_of(asyncio.get_running_loop())
        self._waker = lambda: waker.wake(ready)
        ended = False
        try:
            while not ended:
                ready.clear()
                while not self._events.empty():
                    event = self._events.get_nowait()
                    ended = isinstance(event, LAST_EVENTS)
                    yield event
                if not ended:
                    await ready.wait()
        finally:
            self._waker = None
            if not ended:
                self.cancel()


class Engine:
    """Serves requests from any thread."""

    def __init__(
        self, model: Model, options: EngineOptions | None = None, *, progress: bool = False
    ):
        """Allocates the caches, compiles every program, and starts the loop.

        Raises:
          ValueError: naming the option that does not fit the model.
        """
        self.model, self.options = model, options or EngineOptions()
        self._core = EngineCore(model, self.options)
        if self.options.warm_up:
            self._core.device.warm_up(self.options.bounded, progress)
        self._ready_compilations = compilations()
        self._numbers = itertools.count()
        self._arrived: list[Sequence] = []
        self._lock = threading.Condition()
        self._draining = self._closed = False
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ds41jax-engine", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether the loop is alive."""
        return self._thread.is_alive() and self._fault is None

    def submit(self, request: Request) -> RequestHandle:
        """Hands a request in; returns at once.

        Raises:
          EngineError: "invalid", "queue_full", "draining" or "closed".
        """
        number = next(self._numbers)
        holder: list[Sequence] = []
        handle = RequestHandle(number, lambda: self._cancel(holder[0]))
        sequence = self._core.preparer.sequence(request, handle.put)
        sequence.id = handle.id
        holder.append(sequence)
        with self._lock:
            if self._closed or not self.healthy:
                raise EngineError("closed", "the engine has stopped")
            if self._draining:
                raise EngineError("draining", "the engine is shutting down")
            if self._waiting() >= self.options.max_queue + self._free_places():
                raise EngineError("queue_full", f"{self._waiting()} requests are waiting already")
            self._arrived.append(sequence)
            self._lock.notify()
        return handle

    def generate(self, requests: Iterable[Request]) -> list[Output]:
        """Runs requests together and waits for them all; results in the requests' order.

        Any number of them: those that the queue has no place for are submitted as others end.

        Raises:
          EngineError: of the first request that was refused or failed; the others are cancelled.
        """
        pending: deque[tuple[RequestHandle, Request]] = deque()
        outputs: list[Output] = []
        try:
            for request in requests:
                while (handle := self._submit_if_room(request, bool(pending))) is None:
                    outputs.append(self._gather(*pending.popleft()))
                pending.append((handle, request))
            while pending:
                outputs.append(self._gather(*pending.popleft()))
        finally:
            for handle, _ in pending:
                handle.cancel()
        return outputs

    def _submit_if_room(self, request: Request, can_wait: bool) -> RequestHandle | None:
        """Submits a request; None if the queue is full and the caller may wait for a place."""
        try:
            return self.submit(request)
        except EngineError as error:
            if error.kind == "queue_full" and can_wait:
                return None
            raise

    def _gather(self, handle: RequestHandle, request: Request) -> Output:
        ends = {self.model.config.eos_token_id, *request.stop_token_ids}
        return gather(handle, self.model.tokenizer, ends)

    async def stream(self, request: Request) -> AsyncIterator[Event]:
        """Yields a request's events as they come; leaving the loop early cancels the request.

        Raises:
          EngineError: as `submit`; a later failure is the last event, `Failed`.
        """
        async with aclosing(aiter(self.submit(request))) as events:
            async for event in events:
                yield event

    def _waiting(self) -> int:
        return len(self._arrived) + len(self._core.waiting)

    def _free_places(self) -> int:
        return max(0, self.options.max_active - len(self._core.active))

    def _cancel(self, sequence: Sequence) -> None:
        with self._lock:
            sequence.cancelled = True
            self._lock.notify()

    def _run(self) -> None:
        """The loop thread. A fault ends every request with a reason and the engine as a whole."""
        core = self._core
        try:
            while True:
                with self._lock:
                    while core.idle and not self._arrived and not self._closed:
                        self._lock.wait()
                    if self._closed:
                        break
                    for sequence in self._arrived:
                        core.add(sequence)
                    self._arrived.clear()
                core.step()
            self._fail_rest(EngineError("closed", "the engine was closed"))
        except BaseException as error:
            self._fault = error
            self._fail_rest(EngineError("internal", f"the engine stopped: {error!r}"))
            raise

    def _fail_rest(self, error: EngineError) -> None:
        with self._lock:
            for sequence in self._arrived:
                sequence.emit(Failed(error))
            self._arrived.clear()
            self._core.fail_all(error)

    def observe(self, observer: Observer | None) -> None:
        """Tells `observer` about every step from the next one on; None ends that.

        One observer at a time: the one before is let go. See `ds41jax.engine.observer`.
        """
        self._core.watched.observer = observer

    def stats(self) -> EngineStats:
        """Counters and gauges, read without stopping the loop."""
        core = self._core
        totals = vars(core.counters) | {
            "finished": dict(core.counters.finished),
            "failed": dict(core.counters.failed),
            "times": dict(vars(core.counters.times)),
        }
        return EngineStats(
            active=len(core.active),
            waiting=self._waiting(),
            max_active=self.options.max_active,
            max_queue=self.options.max_queue,
            draining=self._draining,
            healthy=self.healthy,
            pool_pages=core.pool.size,
            free_pages=core.pool.free,
            compiled_after_ready=compilations() - self._ready_compilations,
            totals=totals,
            cache=dataclasses.asdict(core.cache.stats()),
            policy=core.speculation.policy.stats() if core.dspark else {"mode": "off"},
        )

    def drain(self, timeout: float = 600.0) -> bool:
        """Refuses new requests and waits for the others; whether all ended in time."""
        with self._lock:
            self._draining = True
        deadline = time.monotonic() + timeout
        while not (self._core.idle and not self._arrived) and self.healthy:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return self.healthy

    def close(self) -> None:
        """Ends every request and the loop. Does nothing the second time."""
        with self._lock:
            self._closed = True
            self._lock.notify()
        self._thread.join()
        self._core.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
