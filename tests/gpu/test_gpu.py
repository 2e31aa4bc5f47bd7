"""Scans on a CUDA device, where there is one: the numbers of each kernel (`make gpu`)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from affine_cells import AFFINE, assert_same_nans_too, hard, reset
from gpu_cells import CASES, DRAW_CASES
from graph_caches import graph_caches
from on_the_cpu import serving
from oracle import TOLERANCE, assert_same, differentiable, gradients, zeros_for_none
from torch.utils import _pytree as pytree

from torch_scan_hop import scan
from torch_scan_hop.cuda_graphs.devices import CudaGraphs
from torch_scan_hop.inductor.watch import watching
from torch_scan_hop.reference import scan_loop
from torch_scan_hop.rewrites import using_options

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
    with watching(lambda _, kernel, __: chosen.append(kernel and type(kernel))):
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


@pytest.mark.parametrize("name", DRAW_CASES)
def test_steps_that_draw_are_kernels(name):
    from torch_scan_hop.inductor import gpu

    case, T, chosen = DRAW_CASES[name], 33, []
    drawn = case.drawn(T, torch.float32)
    inputs, exact = leaves(drawn, "cuda", torch.float32), leaves(drawn, "cpu", torch.float64)
    with watching(lambda _, kernel, __: chosen.append(kernel and type(kernel))):
        got = on_cpu(torch.compile(case.run, fullgraph=True)(*inputs))
        want = case.loop_with(got[1][1].detach(), exact, T, False)
        assert_same(got, want, TOLERANCE[torch.float32] * 8, dtype=False)
        wrt, exact_wrt = differentiable(inputs), differentiable(exact)
        ours = zeros_for_none(gradients(got, wrt), wrt)
        theirs = zeros_for_none(gradients(want, exact_wrt), exact_wrt)
        assert_same(on_cpu(ours), theirs, TOLERANCE[torch.float32] * 32, dtype=False)
    assert chosen[0] in gpu.KERNELS


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("T", [256, 1023, 1024, 1025, 3 * 1024 + 7])
@pytest.mark.parametrize("name", AFFINE)
def test_kernels_parallel_in_time_compute_the_loop(name, T, reverse):
    from torch_scan_hop.inductor import gpu

    case, chosen = AFFINE[name], []
    drawn = case.inputs(T)
    inputs, exact = (leaves(drawn, device, torch.float64) for device in ("cuda", "cpu"))
    with watching(lambda _, kernel, __: chosen.append(kernel and type(kernel))):
        got = torch.compile(lambda *a: case.run(*a, reverse=reverse), fullgraph=True)(*inputs)
        init, xs, parameters = exact
        want = scan_loop(lambda c, x: case.step(c, x, parameters), init, xs, T, reverse)
        assert_same(on_cpu(got), want, 1e-9)
        wrt, exact_wrt = differentiable(inputs), differentiable(exact)
        if wrt:
            ours = zeros_for_none(gradients(on_cpu(got), wrt), wrt)
            theirs = zeros_for_none(gradients(want, exact_wrt), exact_wrt)
            assert_same(on_cpu(ours), theirs, 1e-8)
    assert set(chosen) == {gpu.ParallelKernel}


@pytest.mark.parametrize("T", [300, 3000])
def test_numbers_of_which_no_product_may_be_taken(T):
    inputs = hard(T, 8)
    on_gpu = pytree.tree_map_only(torch.Tensor, torch.Tensor.cuda, inputs)
    with torch.no_grad():
        got = on_cpu(
            torch.compile(lambda *a: scan(lambda c, x: reset(c, x, None), *a))(*on_gpu[:2])
        )
    want = scan_loop(lambda c, x: reset(c, x, None), *inputs[:2], T, False)
    assert_same_nans_too(got, want)


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


# --- loops that are no kernel, as graphs of our own ---


class NotedGraphs(CudaGraphs):
    """Torch's, and how many were captured and replayed."""

    def __init__(self):
        self.captures = self.replays = self.failures = 0

    def capture(self, device, work):
        replay = super().capture(device, work)
        self.captures += 1

        def noted():
            self.replays += 1
            replay()

        return noted

    def recover(self, device):
        self.failures += 1
        super().recover(device)


def attention(carry, x, w):
    keys, values = carry
    q, k, v = (x @ w).chunk(3, -1)
    keys = torch.cat([keys[:, 1:], k[:, None]], 1)
    values = torch.cat([values[:, 1:], v[:, None]], 1)
    weights = torch.softmax((keys @ q[:, :, None])[..., 0], -1)
    return (keys, values), (weights[:, None] @ values)[:, 0]


def attention_inputs(T, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3

    return (draw(4, 8, 16), draw(4, 8, 16)), draw(T, 4, 16), draw(16, 48)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_loop_is_replayed(is_compiled, reverse):
    def run(init, xs, w):
        return scan(lambda c, x: attention(c, x, w), init, xs, reverse=reverse)

    noted = NotedGraphs()
    with serving("cuda", noted), using_options(cuda_graphs=True), graph_caches(False):
        ours = torch.compile(run, fullgraph=True, dynamic=False) if is_compiled else run
        for seed, T in enumerate((40, 40, 40) if is_compiled else (40, 40, 40, 57)):
            drawn = attention_inputs(T, seed)
            inputs, exact = (leaves(drawn, d, torch.float64) for d in ("cuda", "cpu"))
            got = ours(*inputs)
            init, xs, w = exact
            want = scan_loop(lambda c, x, w=w: attention(c, x, w), init, xs, T, reverse)
            assert_same(on_cpu(got), want, 1e-9)
            wrt, exact_wrt = differentiable(inputs), differentiable(exact)
            found = gradients(on_cpu(got), wrt)
            assert_same(on_cpu(found), gradients(want, exact_wrt), 1e-8)
    assert noted.failures == 0 and noted.captures >= 2 and noted.replays >= 2 * 2 * 2


def test_random_numbers_go_on_after_a_capture_that_failed(caplog):
    """What reads a number on the host cannot be captured: the loop runs all the same."""
    from torch_scan_hop.cuda_graphs.graphed import GraphedLoop

    def loop(order, carry, xs, additional, ys):
        total = carry[0]
        for t in order:
            total = total + xs[0][t].item()
        return [total]

    run, noted = GraphedLoop(), NotedGraphs()
    with serving("cuda", noted):
        for _ in range(3):
            xs = torch.arange(8.0, device="cuda")
            (total,) = run(loop, range(8), [torch.zeros((), device="cuda")], [xs], [], [])
            assert total.item() == 28
    assert (noted.failures, noted.replays) == (1, 0)
    assert [r.message for r in caplog.records if "CUDA graph" in r.message]
    caplog.clear()  # the warning is what this is about
    assert torch.rand(8, device="cuda").unique().numel() > 1
    assert F.dropout(torch.ones(64, device="cuda"), 0.5).min() == 0


# --- what autograd's own thread for a GPU would change ---


class Doubled(torch.autograd.Function):
    """A scan with it is differentiated step by step, in a scan within the trace of another."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


@pytest.mark.parametrize("policy", ["sqrt", "full", None])
def test_nested_scans_are_traced_in_one_thread(policy):
    """Else they wait for each other: this test would not end."""
    xs = torch.rand(9, 5, device="cuda", requires_grad=True)
    w = torch.rand(5, 5, device="cuda", requires_grad=True)

    def step(h, x):
        return scan(lambda g, v: (g.tanh() + Doubled.apply(v) @ w, None), h + x, w)[0], h

    def loop(h, x):
        return scan_loop(lambda g, v: (g.tanh() + 2 * v @ w, None), h + x, w, 5, False)[0], h

    got = scan(step, torch.zeros(5, device="cuda"), xs, checkpoint=policy)
    want = scan_loop(loop, torch.zeros(5, device="cuda"), xs, 9, False)
    assert_same(got, want, 1e-4)
    assert_same(gradients(on_cpu(got), [xs, w]), gradients(on_cpu(want), [xs, w]), 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # two kinds of attention
def test_attention_is_trained(dtype):
    """What it hands its backward of random numbers lies where no kernel reads it."""
    xs = torch.rand(9, 2, 2, 8, 16, device="cuda", dtype=dtype, requires_grad=True)
    ones = torch.ones(2, 2, 8, 16, device="cuda", dtype=dtype)

    def step(h, x):
        h = F.scaled_dot_product_attention(h + x, h, x)
        return h, h

    def run(xs):
        return scan(step, ones, xs)[1]

    tolerance = TOLERANCE[dtype]
    for ours in (run, torch.compile(run, fullgraph=True)):
        want = scan_loop(step, ones, xs, 9, False)[1]
        got = ours(xs)
        assert_same(got, want, tolerance)
        found, wanted = gradients([got.cpu()], [xs]), gradients([want.cpu()], [xs])
        assert_same(found, wanted, 10 * tolerance)
