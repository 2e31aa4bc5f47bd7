"""The numbers of the Triton kernels, in Triton's interpreter: run by ``test_gpu_numbers``.

A compiled scan on the CPU takes the kernel that it would take on a GPU.
"""

from __future__ import annotations

import contextlib

import pytest

pytest.importorskip("triton")

import torch
import triton_interpreter  # noqa: F401  before Inductor
from gpu_cells import CASES
from oracle import TOLERANCE, assert_same, differentiable, gradients, zeros_for_none
from torch._inductor import config
from torch.utils import _pytree as pytree

from torch_scan_hop.inductor import gpu
from torch_scan_hop.inductor.gpu.serving import on_the_cpu
from torch_scan_hop.inductor.watch import watching
from torch_scan_hop.reference import scan_loop

POINTWISE = gpu.KERNELS[0]


@contextlib.contextmanager
def compiled_for_gpu():
    """Scans compiled within are Triton kernels; the list has the kernel of each scan."""
    chosen = []
    with (
        on_the_cpu(),
        watching(lambda _, kernel: chosen.append(kernel)),
        config.patch(force_disable_caches=True),
    ):
        yield chosen


def wanted(case, inputs, T, reverse):
    """What the loop computes in float64."""
    init, xs, parameters = inputs
    return scan_loop(lambda c, x: case.step(c, x, parameters), init, xs, T, reverse)


def as_leaves(inputs):
    def leaf(value):
        return value.detach().requires_grad_() if value.dtype.is_floating_point else value

    return pytree.tree_map_only(torch.Tensor, leaf, inputs)


def in_float64(inputs):
    def cast(value):
        value = value.detach()
        return value.double().requires_grad_() if value.dtype.is_floating_point else value

    return pytree.tree_map_only(torch.Tensor, cast, inputs)


def check(name, T, reverse=False, dtype=torch.float64, train=True, **options):
    """Values, and all gradients but of parameters that a batch shares, whose sum is no lane's."""
    case = CASES[name]
    inputs = case.drawn(T, dtype)
    exact = in_float64(inputs)
    if train:
        inputs = (*as_leaves(inputs[:2]), inputs[2])
    with compiled_for_gpu() as chosen:
        run = torch.compile(lambda *a: case.run(*a, reverse=reverse), fullgraph=True, **options)
        got = run(*inputs)
        wrt, exact_wrt = differentiable(inputs[:2]), differentiable(exact[:2])
        result = wanted(case, exact, T, reverse)
        assert_same(got, result, TOLERANCE[dtype], dtype=False)
        if train and wrt:
            assert_same(
                zeros_for_none(gradients(got, wrt), wrt),
                zeros_for_none(gradients(result, exact_wrt), exact_wrt),
                TOLERANCE[dtype] * 4,
                dtype=False,
            )
    return chosen


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, reverse):
    chosen = check(name, 5, reverse)
    assert chosen and set(chosen) == {POINTWISE}
    trains = bool(differentiable(CASES[name].inputs(1)))
    assert len(chosen) == 1 + trains


@pytest.mark.parametrize("T", [0, 1, 2, 3, 4, 33])
def test_any_trip_count(T):
    chosen = check("gated", T, reverse=T % 2 == 1)
    assert chosen == [POINTWISE] * (0 if T == 0 else 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gated", "two carries", "transcendental"])
def test_types(name, dtype):
    assert check(name, 5, dtype=dtype) == [POINTWISE] * 2
