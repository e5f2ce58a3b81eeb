"""Counts XLA compilations of this process, so that a ready engine can show that none happens."""

import threading

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_lock = threading.Lock()
_count = 0


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    global _count
    if event == _EVENT:
        with _lock:
            _count += 1


jax.monitoring.register_event_duration_secs_listener(_listen)


def compilations() -> int:
    """Programs compiled so far."""
    return _count
