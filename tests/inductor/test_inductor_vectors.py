"""What kernels load and store as vectors though they compute it apart: parts of complex numbers."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
import torch._inductor.config as inductor_config
from cells import Draw
from oracle import assert_same, gradients, loop
from torch._inductor.utils import run_and_get_code

from torch_scan_hop import scan

pytestmark = pytest.mark.torch_version

DRAW = Draw(torch.float32)


def at_the_end_of_its_memory(*sizes):
    """Every second number, of memory that ends with the last of them."""
    numbers = 2 * torch.Size(sizes).numel() - 1
    strides = torch.empty(*sizes, 2).stride()[:-1]
    return DRAW.normal(numbers).as_strided(sizes, strides)


def recurrence(h, x):
    h = 0.5 * h + x.sin()
    return h, h


@pytest.mark.parametrize("lanes", [16, 37])
@pytest.mark.parametrize("bits", [None, 256], ids=["widest", "avx2"])
def test_every_second_number(lanes, bits):
    h, xs = DRAW.normal(3, lanes), at_the_end_of_its_memory(5, 3, lanes)
    with inductor_config.patch({"cpp.simdlen": bits, "force_disable_caches": True}):
        got, (code,) = run_and_get_code(
            torch.compile(lambda h, xs: scan(recurrence, h, xs), fullgraph=True), h, xs
        )
    assert_same(got, loop(recurrence, h, xs), 1e-5)
    assert "= scan_every_second(" in code


@pytest.mark.parametrize(
    ("reverse", "cpp_wrapper"),
    [
        (False, False),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
        (True, True),
    ],
)
def test_the_backward_of_a_complex_recurrence_reads_its_stack_in_place(reverse, cpp_wrapper):
    """Neither the carries into its steps nor the parts of anything are copied before the loop."""
    a = torch.polar(DRAW.normal(37).sigmoid(), DRAW.normal(37)).requires_grad_()

    def cell(h, x):
        h = a * h + x
        return h, h

    h = torch.complex(DRAW.normal(3, 37), DRAW.normal(3, 37)).requires_grad_()
    xs = torch.complex(DRAW.normal(40, 3, 37), DRAW.normal(40, 3, 37)).requires_grad_()

    def train(run):
        _, ys = run(cell, h, xs, reverse=reverse)
        return gradients(ys, [h, xs, a])

    options = {"cpp_wrapper": cpp_wrapper}
    compiled = torch.compile(scan, fullgraph=True, options=options)
    with inductor_config.patch(force_disable_caches=True):
        got, codes = run_and_get_code(train, compiled)
    assert_same(got, train(loop), 1e-4)
    assert len(codes) >= 2
    backward = codes[1] if not cpp_wrapper else codes[-1]
    assert "scan_every_second(" in backward
    # the gradient of xs, which the kernel writes
    assert len(re.findall("empty_strided.*complex64", backward)) == 1


def mean_of_complex(h, x):
    h = (0.5 + 0.3j) * h + x
    return h, (h, h.abs(), 1j * h)


def without_a_carry_alike(h, x):
    return h + x.real, x * h


COMPLEX_YS = {
    "tiles": (mean_of_complex, (3, 37), torch.complex64),
    "tiles, double": (mean_of_complex, (3, 37), torch.complex128),
    "few lanes": (mean_of_complex, (3,), torch.complex64),
    "a scalar": (mean_of_complex, (), torch.complex64),
}


@pytest.mark.parametrize("cpp_wrapper", [False, True])
@pytest.mark.parametrize("case", COMPLEX_YS)
def test_a_kernel_writes_complex_ys_as_they_lie(case, cpp_wrapper):
    cell, shape, dtype = COMPLEX_YS[case]
    h, xs = torch.randn(shape, dtype=dtype), torch.randn(7, *shape, dtype=dtype)
    options = {"cpp_wrapper": cpp_wrapper, "force_disable_caches": True}
    with inductor_config.patch(options):
        got, (code,) = run_and_get_code(
            torch.compile(lambda h, xs: scan(cell, h, xs, reverse=True), fullgraph=True), h, xs
        )
    assert_same(got, loop(cell, h, xs, reverse=True), 1e-5)
    # both stacks
    assert len(set(re.findall(r"auto (scan_buf_parts_\d+) =", code))) == 2
    if case == "tiles":
        assert code.count("scan_side_by_side(scan_buf_parts_") >= 2
        # a line of the cache holds both parts, and is fetched once
        fetched = re.findall(r"SCAN_PREFETCH_TO_WRITE\((scan_buf_parts_\d+) \+ ", code)
        assert fetched and all(a != b for a, b in itertools.pairwise(fetched))


@pytest.mark.parametrize("shape", [(3, 37), (3,)])
def test_parts_that_are_read_apart_are_joined_by_torch(shape):
    """What else reads a part finds it in a tensor of its own."""
    h, xs = torch.randn(shape), torch.randn(7, *shape, dtype=torch.complex64)

    def run(scan):
        last, ys = scan(without_a_carry_alike, h, xs)
        return last, ys, ys.real.sum(0), torch.view_as_real(ys).amax()

    assert_same(torch.compile(run, fullgraph=True)(scan), run(loop), 1e-5)


def test_complex_ys_are_tensors_of_their_own():
    """No views of what a kernel wrote, which autograd would not let be changed in place."""
    h, xs = torch.randn(3, dtype=torch.complex64), torch.randn(7, 3, dtype=torch.complex64)
    _, (ys, *_) = torch.compile(lambda h, xs: scan(mean_of_complex, h, xs), fullgraph=True)(h, xs)
    assert ys._base is None
    weight = torch.ones(3, requires_grad=True)
    ys *= weight
    assert ys.requires_grad
