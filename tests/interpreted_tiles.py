"""The numbers of the kernels that are parallel in time, in Triton's interpreter.

Run by ``test_gpu_numbers``. Tiles are of few rows, so that few steps are several tiles.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest

pytest.importorskip("triton")

import torch
import triton_interpreter  # noqa: F401  before Inductor
from gpu_cells import Case, randn
from interpreted_kernels import compiled_for_gpu, in_float64, as_leaves
from oracle import TOLERANCE, assert_same, differentiable, gradients, zeros_for_none

from torch_scan_hop.inductor.gpu import ParallelKernel, PointwiseKernel, parallel
from torch_scan_hop.reference import scan_loop

ROWS = 8  # of a tile of 8 lanes


@contextlib.contextmanager
def small_tiles():
    with (
        mock.patch.object(parallel, "LEAST_STEPS", 1),
        mock.patch.object(parallel, "ELEMENTS", ROWS * parallel.MOST_LANES),
    ):
        yield


def ema(h, x, _):
    h = 0.9 * h + 0.1 * x
    return h, h


CASES = {"ema": Case(ema, lambda T: (randn(37), randn(T, 37), None))}


def check(case, T, reverse=False, dtype=torch.float64, train=True):
    inputs = case.drawn(T, dtype)
    exact = in_float64(inputs)
    inputs = as_leaves(inputs) if train else inputs
    with compiled_for_gpu() as chosen, small_tiles():
        run = torch.compile(lambda *a: case.run(*a, reverse=reverse), fullgraph=True)
        got = run(*inputs)
        wrt, exact_wrt = differentiable(inputs), differentiable(exact)
        init, xs, p = exact
        want = scan_loop(lambda c, x: case.step(c, x, p), init, xs, T, reverse)
        assert_same(got, want, TOLERANCE[dtype], dtype=False)
        if train and wrt:
            ours = zeros_for_none(gradients(got, wrt), wrt)
            theirs = zeros_for_none(gradients(want, exact_wrt), exact_wrt)
            assert_same(ours, theirs, TOLERANCE[dtype] * 4, dtype=False)
    return chosen


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, reverse):
    assert check(CASES[name], 3 * ROWS + 7, reverse) == [ParallelKernel] * 2
