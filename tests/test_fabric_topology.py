"""Topologies and placements: what is split how, and what is refused."""

import dataclasses

import pytest
from fabric_workers import WIDTH, place, wide_checkpoint
from oracle import tiny_model

from ds41jax.fabric.topology import TOPOLOGIES, Placement, find_topology, make_placement

OFFICIAL = Placement(find_topology("TP4EP1"), 5, 40, 5120, 384, 6, 2304)


def test_the_legal_topologies_are_all_there() -> None:
    names = {"TP2EP1", "TP3EP1", "TP4EP1", "TP6EP1", "TP2EP2", "TP3EP2", "TP2EP3"}
    assert set(TOPOLOGIES) == names
    assert {t.ranks for t in TOPOLOGIES.values()} == {2, 3, 4, 6}


@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
def test_every_group_holds_every_column_once(name: str) -> None:
    topology = find_topology(name)
    for width in (WIDTH, 2304):
        for group in range(topology.ep):
            ranks = [r for r in range(topology.ranks) if topology.group(r) == group]
            columns = [c for r in ranks for c in range(width)[topology.columns(r, width)]]
            assert columns == list(range(width))


def test_official_slices_have_the_published_widths() -> None:
    widths = {
        name: len(range(2304)[t.columns(0, 2304)]) for name, t in TOPOLOGIES.items() if t.ep == 1
    }
    assert widths == {"TP2EP1": 1152, "TP3EP1": 768, "TP4EP1": 576, "TP6EP1": 384}


def test_executors_differ_between_topologies() -> None:
    numbers = [t.executor + r for t in TOPOLOGIES.values() for r in range(t.ranks)]
    assert len(numbers) == len(set(numbers))


def test_a_width_that_does_not_split_says_so() -> None:
    config = tiny_model().config
    assert make_placement(config, find_topology("TP2EP1")).width == 64
    with pytest.raises(ValueError, match="TP3EP1 splits experts into multiples of 32 columns"):
        make_placement(config, find_topology("TP3EP1"))


@pytest.mark.parametrize("name", ["TP5EP1", "TP4", "TP1EP1", "TP2EP4", ""])
def test_an_unknown_topology_lists_those_that_exist(name: str) -> None:
    with pytest.raises(ValueError, match="must be one of TP2EP1, TP2EP2"):
        find_topology(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_layer": 40}, "first remote layer must lie in 0..39"),
        ({"first_layer": -1}, "first remote layer must lie in 0..39"),
        ({"owners": "random"}, "owners must be one of balanced, fixed"),
        ({"experts": 513}, "at most 512 experts"),
        ({"hidden": 5121}, "multiples of 32 columns"),
    ],
)
def test_an_impossible_placement_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(OFFICIAL, **change)


def test_placements_differ_in_version() -> None:
    path = wide_checkpoint()
    made = [
        place(path, name, first, owners).version
        for name in TOPOLOGIES
        for first in (0, 3)
        for owners in ("balanced", "fixed")
    ]
    assert len(set(made)) == len(made)
    assert place(path, "TP2EP1").version == place(path, "TP2EP1").version
