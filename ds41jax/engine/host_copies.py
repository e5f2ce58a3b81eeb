"""The host-RAM tier's bytes: snapshots copied between the device and preallocated host arrays."""

import time
from typing import Any

import jax
import numpy as np

from ds41jax.cache.host_tier import RestoreTicket, StoreTicket
from ds41jax.engine import cache_moves
from ds41jax.engine.device import Device

POLL_SECONDS = 0.001


class HostCopier:
    """Implements `cache.host_tier.Copier`. Used by the engine's loop thread alone."""

    def __init__(self, device: Device, slots: int, pages: int):
        """Allocates places for `slots` snapshots and `pages` pages."""
        self._device = device
        slot = jax.eval_shape(cache_moves.read_slot, device.state, np.int32(0))
        page = jax.eval_shape(cache_moves.read_page, device.state, np.int32(0))
        self._slots = jax.tree.map(lambda x: np.zeros((slots, *x.shape), x.dtype), slot)
        self._pages = jax.tree.map(lambda x: np.zeros((pages, *x.shape), x.dtype), page)
        self._arriving: dict[int, tuple[Any, list[Any]]] = {}

    def warm_up(self) -> None:
        """Compiles the moves before the first request, on places that are empty and stay so."""
        device, first = self._device, np.int32(0)
        slot, page = jax.tree.map(lambda x: x[0], (self._slots, self._pages))
        device.state = cache_moves.write_slot(device.state, first, slot)
        device.state = cache_moves.write_page(device.state, first, page)
        jax.block_until_ready(cache_moves.read_slot(device.state, first))
        jax.block_until_ready(cache_moves.read_page(device.state, first))

    def start(self, ticket: StoreTicket | RestoreTicket) -> None:
        """Begins a store as the caches are now; a restore is dispatched whole."""
        if isinstance(ticket, StoreTicket):
            self._start_store(ticket)
        else:
            self._restore(ticket)

    def _start_store(self, ticket: StoreTicket) -> None:
        state = self._device.state
        slot = cache_moves.read_slot(state, np.int32(ticket.arena_slot))
        pages = [cache_moves.read_page(state, np.int32(c.source)) for c in ticket.copies]
        for array in jax.tree.leaves((slot, pages)):
            array.copy_to_host_async()
        self._arriving[id(ticket)] = slot, pages

    def _restore(self, ticket: RestoreTicket) -> None:
        device, place = self._device, ticket.host.slot
        kept = jax.tree.map(lambda x: x[place], self._slots)
        state = cache_moves.write_slot(device.state, np.int32(ticket.arena_slot), kept)
        for copy in ticket.copies:
            page = jax.tree.map(lambda x, source=copy.source: x[source], self._pages)
            state = cache_moves.write_page(state, np.int32(copy.target), page)
        device.state = state

    def finish(self, ticket: StoreTicket | RestoreTicket, timeout: float) -> bool:
        """Whether everything has arrived within `timeout` seconds."""
        if isinstance(ticket, RestoreTicket):
            return True  # later steps read the state that the restore wrote
        slot, pages = self._arriving[id(ticket)]
        deadline = time.monotonic() + timeout
        while not all(array.is_ready() for array in jax.tree.leaves((slot, pages))):
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SECONDS)
        del self._arriving[id(ticket)]
        _put(self._slots, ticket.host.slot, slot)
        for copy, page in zip(ticket.copies, pages, strict=True):
            _put(self._pages, copy.target, page)
        return True

    def cancel(self, ticket: StoreTicket | RestoreTicket) -> None:
        """Nothing is written to a store's places before `finish`, so forgetting it is enough."""
        self._arriving.pop(id(ticket), None)


def _put(places: Any, index: int, arrays: Any) -> None:
    for place, array in zip(jax.tree.leaves(places), jax.tree.leaves(arrays), strict=True):
        place[index] = np.asarray(array)
