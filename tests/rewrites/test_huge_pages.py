"""Large stacks lie in huge pages, where the system has them."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch
from torch._inductor import config

from torch_scan_hop import huge_pages, scan

SMAPS = Path("/proc/self/smaps")
HEAD = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ")
pytestmark = pytest.mark.skipif(
    not (SMAPS.exists() and hasattr(mmap, "MADV_HUGEPAGE") and "VmFlags" in SMAPS.read_text()),
    reason="the system does not tell what is asked of it",
)


def is_advised(tensor):
    """Whether huge pages were asked for where the middle of ``tensor`` lies."""
    middle = tensor.data_ptr() + tensor.nbytes // 2
    is_here = False
    for line in SMAPS.read_text().splitlines():
        if found := HEAD.match(line):
            begin, end = (int(number, 16) for number in found.groups())
            is_here = begin <= middle < end
        elif is_here and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("in no mapping")


def running_products(h, xs):
    def cell(h, x):
        h = h * x
        return h, h

    return scan(cell, h, xs)[1]


def loop_of_products(h, xs):
    def cell(h, x):
        h = h.cumsum(0) * x  # no kernel of ours: a loop that Inductor counts
        return h, h

    return scan(cell, h, xs)[1]


def inputs(steps):
    torch.manual_seed(0)
    # so large that each tensor is a mapping of its own, of which only this test asks anything
    width = 2**26 // 4 // steps
    return torch.ones(width), torch.rand(steps, width)


RUNS = {
    "eager": (running_products, False),
    "kernel": (torch.compile(running_products), False),
    "kernel, any size": (torch.compile(running_products, dynamic=True), False),
    "kernel, C++": (torch.compile(running_products), True),
    "loop": (torch.compile(loop_of_products), False),
    "loop, C++": (torch.compile(loop_of_products), True),
}


@pytest.mark.parametrize("kind", RUNS)
def test_a_large_stack_lies_in_huge_pages(kind):
    torch.compiler.reset()
    run, cpp = RUNS[kind]
    h, xs = inputs(8)
    with config.patch(cpp_wrapper=cpp):
        ys = run(h, xs)
    assert ys.nbytes > huge_pages.LEAST_BYTES
    assert is_advised(ys)
    assert not is_advised(xs)


def test_stacks_that_are_made_in_blocks_do_so_in_eager_mode():
    h, xs = inputs(64)
    xs.requires_grad_()
    running_products(h, xs).sum().backward()
    assert is_advised(xs.grad)


def test_a_small_stack_is_left_alone(monkeypatch):
    monkeypatch.setattr(huge_pages, "_madvise", lambda: pytest.fail("the system was asked"))
    huge_pages.advise(torch.empty(huge_pages.LEAST_BYTES // 8))


def test_a_tensor_without_memory_is_left_alone():
    huge_pages.advise(torch.empty(huge_pages.LEAST_BYTES, device="meta"))


def test_a_system_without_them(monkeypatch):
    monkeypatch.setattr(huge_pages, "_madvise", lambda: None)
    h, xs = inputs(4)
    torch.testing.assert_close(running_products(h, xs), xs.cumprod(0))
