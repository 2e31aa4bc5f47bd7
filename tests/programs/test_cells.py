"""Every cell under every implementation variant equals the float64 loop, values and gradients."""

from __future__ import annotations

import pytest
import torch
from cells import CELLS
from oracle import TOLERANCE, VARIANTS, assert_same, check, gradients, loop

from torch_scan_hop import scan

QUICK = [v for v in VARIANTS if v != "inductor"]
# of several scans, or of many operators: most variants of them are left to the slow tests
LARGE = {"transformer", "stacked_layers", "selective_ssm", "gru", "lstm_cell_module"}


def _cells_and_variants():
    for variant in QUICK:
        for cell in CELLS:
            is_slow = cell in LARGE and variant not in ("eager", "aot_eager")
            marks = [pytest.mark.slow] if is_slow else []
            yield pytest.param(cell, variant, id=f"{variant}-{cell}", marks=marks)


@pytest.mark.works("eager")
@pytest.mark.parametrize(("cell", "variant"), list(_cells_and_variants()))
def test_training_equals_the_loop(cell, variant):
    p = CELLS[cell].problem(torch.float64, T=5, B=2)
    check(p.combine_fn, p.init, p.xs, params=list(p.params.values()), variant=VARIANTS[variant])


@pytest.mark.parametrize("cell", CELLS)
def test_reverse(cell):
    p = CELLS[cell].problem(torch.float64, T=4, B=2)
    check(p.combine_fn, p.init, p.xs, params=list(p.params.values()), reverse=True)


def _cells_and_variants_of_few_steps():
    for variant in ("eager", "aot_eager", "unroll3"):
        for cell in ("lstm", "stacked_layers", "linear_recurrence"):
            is_slow = cell in LARGE and variant != "eager"
            marks = pytest.mark.slow if is_slow else ()
            yield pytest.param(cell, variant, id=f"{variant}-{cell}", marks=marks)


@pytest.mark.parametrize("T", [0, 1, 2])
@pytest.mark.parametrize(("cell", "variant"), list(_cells_and_variants_of_few_steps()))
def test_few_steps(cell, T, variant):
    p = CELLS[cell].problem(torch.float64, T=max(T, 1), B=2)
    xs = torch.utils._pytree.tree_map(lambda x: x.detach()[:T], p.xs)
    check(p.combine_fn, p.init, xs, params=list(p.params.values()), variant=VARIANTS[variant])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cell", ["tanh_rnn", "lstm", "linear_recurrence", "selective_ssm"])
def test_low_precision_is_close_to_float64(cell, dtype):
    low, high = (CELLS[cell].problem(d, T=5, B=2) for d in (dtype, torch.float64))
    actual = scan(low.combine_fn, low.init, low.xs)
    expected = loop(high.combine_fn, high.init, high.xs)
    assert actual[1].dtype == dtype
    assert_same(actual, expected, TOLERANCE[dtype], dtype=False)
    got = gradients(actual, list(low.params.values()))
    want = gradients(expected, list(high.params.values()))
    assert_same(got, want, 3 * TOLERANCE[dtype], dtype=False)


@pytest.mark.torch_version
@pytest.mark.works("torch.compile")
@pytest.mark.parametrize("cell", ["tanh_rnn", "linear_recurrence"])
def test_training_under_inductor(cell):
    p = CELLS[cell].problem(torch.float64, T=5, B=2)
    check(p.combine_fn, p.init, p.xs, params=list(p.params.values()), variant=VARIANTS["inductor"])


@pytest.mark.slow
@pytest.mark.torch_version
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_training_under_inductor_all(cell, reverse):
    p = CELLS[cell].problem(torch.float64, T=5, B=2)
    check(
        p.combine_fn,
        p.init,
        p.xs,
        params=list(p.params.values()),
        variant=VARIANTS["inductor"],
        reverse=reverse,
    )
