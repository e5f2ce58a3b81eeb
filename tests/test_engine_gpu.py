"""The engine's programs on the GPU kernels, lowered without a GPU."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from engine_runs import options
from lowering import DEVICES, gpu_mesh, lower_for_gpu
from oracle import tiny_model

from ds41jax.engine import cache_moves, steps
from ds41jax.engine.core import EngineCore
from ds41jax.engine.device import Device
from ds41jax.engine.options import EngineOptions
from ds41jax.engine.selection import select_step
from ds41jax.formats import Numerics
from ds41jax.kernels.cards import AXIS, Cards
from ds41jax.kernels.compute import Compute, Kernels, Phase, default_compute, default_kernels

KERNELS = ("matmul", "quantize", "route", "mixes", "sparse_attention", "expert_up")


@functools.cache
def device() -> Device:
    core = EngineCore(tiny_model(), options(compute=Compute(kernels=Kernels.PALLAS)))
    return core.device


def lowered(program, state, *args, **static):
    """The program's text for a GPU; `args` follow the state."""
    function = functools.partial(program, **static)
    return lower_for_gpu(function, device().model.params, state, *args, device=next(iter(DEVICES)))


@pytest.mark.parametrize("bounded", [True, False])
def test_prefill_programs_lower_for_gpus(bounded):
    d = device()
    compute = d.prefill_compute
    assert compute.phase is Phase.PREFILL and compute.kernels is Kernels.PALLAS
    batch = d.idle_chunk(64)
    programs = [steps.encode_step, steps.suffix_step] if bounded else [steps.full_step]
    for program in programs:
        text = lowered(program, d.state, batch, config=d.config, compute=compute)
        for kernel in KERNELS:
            assert f'"{kernel}"' in text


def test_round_programs_lower_for_gpus():
    d = device()
    assert d.compute.phase is Phase.DECODE
    for shape in (d.shapes[0], d.shapes[-1]):  # those between differ from the last in rows alone
        batch, choices = d.rounds.idle(shape)
        text = lowered(steps.full_step, d.state, batch, config=d.config, compute=d.compute)
        for kernel in (*KERNELS, "index_scores"):
            assert f'"{kernel}"' in text
        logits = np.zeros((shape.rows, d.config.vocab_size), np.float32)
        text = lowered(
            select_step, d.state, logits, choices, config=d.config, compute=d.compute, dspark=True
        )
        assert '"sparse_attention"' in text  # the drafter's


def test_programs_lower_for_two_gpus():
    """Every step inside `shard_map`, the drafter's stages included."""
    d, name = device(), next(iter(DEVICES))
    mesh = gpu_mesh(2, AXIS, name)
    shape = d.shapes[-1]
    batch, choices = d.rounds.idle(shape)
    logits = np.zeros((shape.rows, d.config.vocab_size), np.float32)
    programs = (
        (steps.encode_step, d.prefill_compute, (d.idle_chunk(64),), {}),
        (steps.suffix_step, d.prefill_compute, (d.idle_chunk(64),), {}),
        (steps.full_step, d.compute, (batch,), {}),
        (select_step, d.compute, (logits, choices), {"dspark": True}),
    )
    for program, compute, args, more in programs:
        split = dataclasses.replace(compute, cards=Cards(mesh))
        function = functools.partial(program, config=d.config, compute=split, **more)
        shapes = jax.eval_shape(lambda *x: x, d.model.params, d.state, *args)
        text = lower_for_gpu(function, *shapes, device=name, mesh=mesh)
        assert '"sparse_attention"' in text and '"stablehlo.all_gather"' in text


def test_cache_moves_lower_for_gpus():
    state, name = device().state, next(iter(DEVICES))
    one = np.int32(0)
    several = np.zeros(3, np.int32)
    lower_for_gpu(cache_moves.copy_slot, state, one, one, device=name)
    lower_for_gpu(cache_moves.copy_pages, state, several, several, device=name)
    for read, write in (
        (cache_moves.read_slot, cache_moves.write_slot),
        (cache_moves.read_page, cache_moves.write_page),
    ):
        lower_for_gpu(read, state, one, device=name)
        lower_for_gpu(write, state, one, jax.eval_shape(read, state, one), device=name)


@pytest.mark.parametrize(
    ("version", "numerics", "kernels"),
    [
        ("PJRT C API\ncuda 13000", Numerics.REFERENCE, Kernels.PALLAS),
        ("PJRT C API\ncuda 13000", Numerics.FLOAT32, Kernels.JNP),
        ("PJRT C API\nrocm 60000", Numerics.REFERENCE, Kernels.JNP),
        ("<unknown>", Numerics.REFERENCE, Kernels.JNP),
    ],
)
def test_kernels_follow_the_platform(monkeypatch, version, numerics, kernels):
    client = SimpleNamespace(platform_version=version)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(client=client)])
    assert default_kernels(numerics) is kernels
    if numerics is Numerics.REFERENCE:
        assert default_compute() == EngineOptions().compute == Compute(kernels=kernels)
