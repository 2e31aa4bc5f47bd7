"""Bools in compiled scans: as vectors of bytes where Inductor's own code does them one by one."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config as inductor_config
from cells import Draw
from oracle import assert_same, gradients, loop, require_grad, zeros_for_none
from torch._inductor.utils import run_and_get_code

from torch_scan_hop import scan, tree

pytestmark = pytest.mark.torch_version

LOADED, STORED = "reinterpret_cast<const uint8_t*>", "reinterpret_cast<uint8_t*>"
ONE_BY_ONE = "::from(in_ptr"


def bools(*sizes):
    return Draw(torch.float64).normal(*sizes) > 0


def masked(dtype, *sizes):
    """A carry that a mask lets through; one kernel, of which the mask is an input."""
    draw = Draw(dtype)
    numbers = (
        draw.normal(*sizes, 5) if dtype.is_floating_point else torch.arange(5.0).expand(*sizes, 5)
    )
    xs = (numbers.movedim(-1, 0).to(dtype).clone(), bools(5, *sizes))

    def body(h, x):
        h = torch.where(x[1], h + x[0], -h)
        return h, h

    return body, torch.ones(sizes, dtype=dtype), xs


def automaton(*sizes):
    """Bools go from step to step, and their neighbours are read."""

    def body(c, x):
        left, right = c.roll(1, -1), c.roll(-1, -1)
        c = ((c | right) & ~(left & c & right)) ^ x
        return c, (c, c.any(), c.sum(-1))

    return body, bools(*sizes), bools(5, *sizes)


def relu_of_products(*sizes):
    """The backward reads which elements were clamped; a product keeps it from being one kernel."""
    draw = Draw(torch.float64)
    w = draw.normal(sizes[-1], sizes[-1])

    def body(h, x):
        h = torch.relu(h @ w + x).sort(-1)[0] * (h > 0.1)
        return h, h

    return body, draw.normal(*sizes), draw.normal(5, *sizes)


def transposed(rows, columns):
    def body(h, x):
        h = torch.where(x[1].mT, h * 0.5, h + x[0]).cumsum(0)
        return h, (h > 0).mT.clone()

    draw = Draw(torch.float64)
    return (
        body,
        draw.normal(rows, columns),
        (draw.normal(5, rows, columns), bools(5, columns, rows)),
    )


CASES = {
    "float32": lambda n: masked(torch.float32, 3, n),
    "float64": lambda n: masked(torch.float64, 3, n),
    "bfloat16": lambda n: masked(torch.bfloat16, 3, n),
    "int64": lambda n: masked(torch.int64, 3, n),
    "int8": lambda n: masked(torch.int8, 3, n),
    "automaton": lambda n: automaton(4, n),
    "relu of products": lambda n: relu_of_products(4, n),
    "transposed": lambda n: transposed(32, n),
}


@pytest.mark.parametrize(("bits", "lanes"), [(None, 32), (256, 37)], ids=["widest", "avx2"])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, bits, lanes):
    body, init, xs = CASES[case](lanes)
    init, xs = require_grad(init), require_grad(xs)
    wrt = [t for t in tree.tensors((init, xs)) if t.requires_grad]

    def train(run):
        result = run(body, init, xs)
        return result, zeros_for_none(gradients(result, wrt), wrt)

    with inductor_config.patch({"cpp.simdlen": bits, "force_disable_caches": True}):
        got, codes = run_and_get_code(train, torch.compile(scan, fullgraph=True))
    tolerance = 2e-2 if case == "bfloat16" else 1e-5 if case == "float32" else 1e-9
    assert_same(got, train(loop), tolerance)
    assert any(LOADED in code for code in codes)
    assert not any(ONE_BY_ONE in code for code in codes)


def test_masks_are_stored_as_vectors():
    body, init, xs = automaton(4, 64)
    compiled = torch.compile(scan, fullgraph=True)
    with inductor_config.patch(force_disable_caches=True):
        got, (code,) = run_and_get_code(compiled, body, init, xs)
    assert_same(got, loop(body, init, xs))
    assert STORED in code


def test_what_is_neither_0_nor_1_in_memory_is_true():
    bytes = torch.arange(64, dtype=torch.uint8).repeat(5, 1)
    masks = bytes.view(torch.bool)

    def body(h, x):
        h = torch.where(x, h + 1, h * 0.5)
        return h, h

    got = torch.compile(scan, fullgraph=True)(body, torch.ones(64), masks)
    assert_same(got, loop(body, torch.ones(64), bytes != 0))


def test_a_program_without_a_scan_is_compiled_as_by_torch_alone():
    def program(a, b):
        return a ^ b, torch.where(a, 1.0, 0.0)

    a, b = bools(64), bools(64)
    scan(lambda c, x: (c ^ x, c), a, bools(5, 64), compile=True)
    with inductor_config.patch(force_disable_caches=True):
        _, (code,) = run_and_get_code(torch.compile(program), a, b)
    assert ONE_BY_ONE in code
    assert LOADED not in code and STORED not in code
