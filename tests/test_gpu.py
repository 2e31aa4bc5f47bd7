"""Scans on a CUDA device, where there is one: the numbers of each kernel (`make gpu`)."""

from __future__ import annotations

import pytest
import torch
from gpu_cells import CASES
from oracle import TOLERANCE, assert_same, differentiable, gradients, zeros_for_none
from torch.utils import _pytree as pytree

from torch_scan_hop.inductor.watch import watching
from torch_scan_hop.reference import scan_loop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.works("CUDA"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def leaves(inputs, device, dtype):
    def leaf(value):
        if not value.dtype.is_floating_point:
            return value.to(device)
        return value.detach().to(device, dtype).requires_grad_()

    return pytree.tree_map_only(torch.Tensor, leaf, inputs)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_compute_the_loop(name, dtype, reverse):
    from torch_scan_hop.inductor import gpu

    case, T, chosen = CASES[name], 33, []
    drawn = case.drawn(T, dtype)
    inputs, exact = leaves(drawn, "cuda", dtype), leaves(drawn, "cpu", torch.float64)
    with watching(lambda _, kernel: chosen.append(kernel)):
        got = torch.compile(lambda *a: case.run(*a, reverse=reverse), fullgraph=True)(*inputs)
        init, xs, parameters = exact
        want = scan_loop(lambda c, x: case.step(c, x, parameters), init, xs, T, reverse)
        tolerance = TOLERANCE[dtype] * 8  # of 33 steps
        assert_same(on_cpu(got), want, tolerance, dtype=False)
        wrt, exact_wrt = differentiable(inputs), differentiable(exact)
        if wrt:
            ours = zeros_for_none(gradients(on_cpu(got), wrt), wrt)
            theirs = zeros_for_none(gradients(want, exact_wrt), exact_wrt)
            assert_same(on_cpu(ours), theirs, tolerance * 4, dtype=False)
    assert chosen and set(chosen) <= set(gpu.KERNELS)


def on_cpu(values):
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, values)


def test_graphs_of_cuda_take_a_scan():
    """``mode="reduce-overhead"``: what is captured is replayed with new inputs."""
    case = CASES["gated"]
    run = torch.compile(case.run, mode="reduce-overhead", fullgraph=True)
    for k in range(4):
        inputs = pytree.tree_map_only(
            torch.Tensor, lambda t, k=k: (t + k).cuda(), case.drawn(9, torch.float32)
        )
        with torch.no_grad():
            got = on_cpu(run(*inputs))
        init, xs, parameters = on_cpu(inputs)
        want = scan_loop(lambda c, x, p=parameters: case.step(c, x, p), init, xs, 9, False)
        assert_same(got, want, 2e-4)
