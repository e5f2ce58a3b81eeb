"""Every topology, worker processes against the same topology in one process, bit for bit."""

import jax.numpy as jnp
import numpy as np
import pytest
from fabric_layers import LIVE, T, in_process, make_rows, through
from fabric_workers import ROWS, fabric, place, wide_checkpoint, wide_model
from oracle import assert_same, rel_rms

from ds41jax.fabric.coordinator import Fabric, FabricOptions
from ds41jax.fabric.exchange import InProcess, partial_sum, slices, unpack_rows
from ds41jax.fabric.library import Event
from ds41jax.fabric.topology import TOPOLOGIES
from ds41jax.formats import Format, decode, encode
from ds41jax.kernels.compute import Compute
from ds41jax.model.moe import moe, route
from ds41jax.model.tensors import at_layer

LAYERS = (0, 7)


@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
def test_the_definition_is_the_sum_in_rank_order(name: str) -> None:
    """Every plane by itself, added in float32 as written in the formula."""
    placement, model = place(wide_checkpoint(), name), wide_model()
    topology, compute = placement.topology, Compute()
    x, layer = make_rows(1), 3
    weights = at_layer(model.params.layers.ffn, jnp.int32(layer))
    k = model.config.num_experts_per_tok
    ids, routing = route(x, jnp.zeros(T, bool), weights.gate, k, model.config)
    sent = encode(x, Format.FP8_GROUP)
    seen = unpack_rows(sent.codes, sent.scales, compute)
    exchange = InProcess(placement)
    live, fault = jnp.arange(T) < LIVE, jnp.int32(0)
    ticket = exchange.send(x, ids, routing, jnp.int32(layer), live, fault, compute)
    found, _ = exchange.wait(ticket, (x,), weights.experts, model.config.swiglu_limit, compute)
    owners = np.asarray(exchange.owners(ids, live, layer))
    total = None
    for rank in range(topology.ranks):
        own = jnp.where(owners[ids] == topology.group(rank), ids, -1)
        mine = slices(weights.experts, topology.columns(rank, placement.width))
        plane = partial_sum(seen, own, routing, mine, model.config.swiglu_limit, compute)
        plane = np.asarray(plane).astype(np.float32)
        total = plane if total is None else total + plane
    assert_same(np.asarray(found)[:LIVE], total[:LIVE])


@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
def test_a_topology_is_near_the_unsplit_model(name: str) -> None:
    """Planes are rounded to bfloat16 once each, which the unsplit experts are not."""
    placement, model = place(wide_checkpoint(), name), wide_model()
    config, k = model.config, model.config.num_experts_per_tok
    for layer in LAYERS:
        found, _ = through(in_process(placement), 2, layer)
        weights = at_layer(model.params.layers.ffn, layer)
        expected = moe(make_rows(2), jnp.zeros(T, bool), weights, k, config, Compute())
        assert rel_rms(found, np.asarray(expected)[:LIVE]) < 0.006


def test_rows_survive_the_wire() -> None:
    """What a worker decodes quantises to the same values again, so its products are the same."""
    x = jnp.concatenate([make_rows(3), make_rows(4) * 1e-6, make_rows(5) * 224])
    sent = encode(x, Format.FP8_GROUP)
    seen = unpack_rows(sent.codes, sent.scales, Compute())
    assert_same(np.asarray(decode(encode(seen, Format.FP8_GROUP))), np.asarray(decode(sent)))


@pytest.mark.parametrize(
    ("name", "transports"),
    [
        ("TP2EP1", "tcp,self"),
        ("TP3EP1", "sm,self"),
        ("TP4EP1", "sm,self"),
        ("TP6EP1", "tcp,self"),
        ("TP2EP2", "sm,self"),
        ("TP3EP2", "sm,self"),
        ("TP2EP3", "tcp,self"),
    ],
)
def test_worker_processes_equal_the_definition(name: str, transports: str) -> None:
    path = wide_checkpoint()
    owners = "fixed" if name == "TP3EP2" else "balanced"
    placement = place(path, name, owners=owners)
    with fabric(path, placement, transports, checksum=name == "TP3EP1") as (connected, processes):
        for seed, layer in enumerate(LAYERS):
            expected, _ = through(in_process(placement), seed, layer)
            found, fault = through(connected.compute(), seed, layer)
            assert fault == 0
            assert_same(found, expected)
        moments = connected.timeline()
        waves = [moments[moments["wave"] == wave] for wave in np.unique(moments["wave"])]
        assert [set(wave["layer"]) for wave in waves] == [{layer} for layer in LAYERS]
        for wave in waves:
            assert list(wave["event"]) == [Event.SENT, Event.AWAITED, Event.SUMMED]
            assert (np.diff(wave["nanoseconds"].astype(np.int64)) >= 0).all()
            assert set(wave["rows"]) == {LIVE}
        printed = [process.stop() for process in processes]
    for text in printed:  # a warm-up frame, and one a layer
        assert f"Answered {1 + len(LAYERS)} frames\n" in text


def test_a_fabric_that_cannot_be() -> None:
    path = wide_checkpoint()
    placement = place(path, "TP2EP1")
    with pytest.raises(ValueError, match="TP2EP1 has 2 workers, not 1"):
        Fabric(path, placement, ["127.0.0.1:1"])
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        Fabric(path, placement, ["127.0.0.1:1", "nowhere"])
    with pytest.raises(ValueError, match="rows must be 1 to 4096"):
        FabricOptions(rows=5000)
    with pytest.raises(ValueError, match="deadline must be"):
        FabricOptions(rows=ROWS, deadline=0)
