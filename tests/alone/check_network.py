"""Workers in another network namespace, behind a wire that delays, loses packets, and is cut.

UCX reads the machine's routes once a process, so no other test may have run here before the wire
was made.
"""

import time

import pytest
from fabric_layers import in_process, through
from fabric_network import THERE, namespace
from fabric_workers import WorkerProcess, place, wide_checkpoint
from oracle import assert_same

from ds41jax.fabric.coordinator import Fabric, FabricOptions

TCP = "tcp,self"
LAYER = 4


def test_delay_loss_and_a_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows arrive whole however the packets do; a cut fails what is under way, and heals."""
    path = wide_checkpoint()
    placement = place(path, "TP2EP1")
    with namespace(delay=0.002, loss=0.01) as (name, wire):
        monkeypatch.setenv("UCX_NET_DEVICES", wire.near)
        inside = ("ip", "netns", "exec", name, "env", f"UCX_NET_DEVICES={wire.far}")
        processes = [
            WorkerProcess(
                path, placement, r, transports=TCP, prefix=inside, host=THERE, port=7400 + r
            )
            for r in range(2)
        ]
        try:
            endpoints = [p.wait().endpoint for p in processes]
            options = FabricOptions(rows=64, transports=TCP, deadline=8.0, control_seconds=3.0)
            with Fabric(path, placement, endpoints, options) as connected:
                connected.wait_ready(60)
                compute = connected.compute()
                carried = wire.carried
                for seed in range(20):
                    found, fault = through(compute, seed, LAYER)
                    assert fault == 0
                    assert_same(found, through(in_process(placement), seed, LAYER)[0])
                assert wire.carried - carried > 100 and wire.lost > 0
                wire.cut = True
                start = time.monotonic()
                _, fault = through(compute, 1, LAYER)
                assert fault != 0 and time.monotonic() - start < 10.0
                wire.cut = False
                connected.wait_ready(60)
                found, fault = through(compute, 2, LAYER)
                assert fault == 0
                assert_same(found, through(in_process(placement), 2, LAYER)[0])
        finally:
            for process in processes:
                process.kill()
