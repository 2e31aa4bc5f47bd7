"""Bodies that write to a part of a large carry: in place, as their loop does, and right."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from allocator import peak_of_allocator
from large_carries import BODIES, ENTRIES
from torch import Tensor

from torch_scan_hop import fallback, scan, tree
from torch_scan_hop.eager import calls, writer
from torch_scan_hop.reference import scan_loop

T, N, WIDTH = 12, 24, 256
XS = torch.linspace(-1.0, 1.0, T * WIDTH).reshape(T, WIDTH)
WIDE = torch.linspace(0.0, 1.0, N * WIDTH).reshape(N, WIDTH).sin()
INDEX = torch.tensor([3, 1, 3])


def write_row(carry: Any, x: Tensor) -> Any:
    c, i = carry
    c[i] = torch.tanh(x * c[i].clone())
    return (c, i + 1), c[i].sum()


def row_of_before(carry: Any, x: Tensor) -> Any:
    c, i = carry
    y = c[i].clone()
    c[i] = c[i + 1].clone() * x
    return (c, i + 1), y


def view_of_before(carry: Any, x: Tensor) -> Any:
    """What reads the old value comes after the write, and is no copy."""
    c, i = carry
    row = c[3:5]
    after = c.index_put((i,), x * c[i])
    return (after, i + 1), row * after[3:5]


def shift(carry: Any, x: Tensor) -> Any:
    c, i = carry
    c[i : i + 4] = c[i + 1 : i + 5].clone() * x[:1]
    return (c, i + 1), c[2]


def shift_from_a_view(carry: Any, x: Tensor) -> Any:
    c, i = carry
    c = torch.slice_scatter(c, c[1:5] * 0.5 + x, 0, 2, 6)
    return (torch.slice_scatter(c, c[7:11], 0, 8, 12), i), c.sum()


def both(carry: Any, x: Tensor) -> Any:
    """The old carry goes on beside the new one."""
    (c, before), i = carry
    after = c.index_copy(0, i[None], torch.sin(x)[None])
    return ((after, c), i + 1), before[i] * after[0]


def swapped(carry: Any, x: Tensor) -> Any:
    (c, d), i = carry
    c[i] = x * d[i].clone()
    return ((d, c), i + 1), d[0].clone()


def the_carry_is_y(carry: Any, x: Tensor) -> Any:
    c, i = carry
    return (c.index_add(0, INDEX, x.expand(3, -1)), i), c


def made_here(carry: Any, x: Tensor) -> Any:
    c, i = carry
    d = torch.sin(c)
    d[i] = x
    e = d.clone()
    e[i + 1] = d[i]
    return (c * 0.5 + e, i + 1), d[0] * e[1]


def by_scatter(carry: Any, x: Tensor) -> Any:
    c, i = carry
    where = INDEX[:, None].expand(3, WIDTH)
    c = c.scatter_add(0, where, x.expand(3, WIDTH).cos())
    c = c.scatter(0, i.expand(1, WIDTH), x[None] * 2)
    return (c, i + 1), c[3]


def filled(carry: Any, x: Tensor) -> Any:
    c, i = carry
    c = c.index_fill(0, i[None], 0.25)
    return (torch.select_scatter(c, x, 0, 5), i + 1), c[6]


def the_carry_is_a_row(carry: Any, x: Tensor) -> Any:
    """Of xs, from the second step on, which is the caller's."""
    c, i = carry
    rows = x.expand(N, WIDTH).contiguous()
    c = torch.index_fill(c, 0, i[None], 0.5)
    return (rows * c, i + 1), c[0]


def x_itself_goes_on(carry: Any, x: Tensor) -> Any:
    return x, carry.index_fill(0, INDEX, 2.0)


def one_memory_for_two(carry: Any, x: Tensor) -> Any:
    (c, d), i = carry
    after = torch.sin(c)
    return ((after, after), i + 1), c.index_copy(0, i[None], x[None]) + d


def part_of_another(carry: Any, x: Tensor) -> Any:
    (c, d), i = carry
    after = torch.cos(c) * x
    return ((after, after[:]), i + 1), d.index_fill(0, i[None], 0.0) + c


def row_of_a_stack(carry: Any, x: Tensor) -> Any:
    """tanh is saved for its derivative where the next step's carry lies."""
    c, i = carry
    c[i] = x
    return (torch.tanh(c * 0.5), i + 1), None


def write_to_a_view(carry: Any, x: Tensor) -> Any:
    """What is written to is a view of the carry, which is written as a whole then."""
    c, i = carry
    rows = c[2:8].index_fill(0, INDEX, 0.5)
    rows = rows.view(6, WIDTH)[:, :].index_fill(1, INDEX, 1.0) * x
    return (torch.slice_scatter(c, rows, 0, 2, 8), i), c[0].clone()


CELLS = [
    write_row,
    row_of_before,
    view_of_before,
    shift,
    shift_from_a_view,
    both,
    made_here,
    by_scatter,
    filled,
    the_carry_is_a_row,
    write_to_a_view,
]
# their next carry is no carry with parts of it written; or a view of it is read afterwards
NOT_A_WRITTEN_CARRY = [view_of_before, shift_from_a_view, both, made_here, the_carry_is_a_row]
# whose memory is another's, too
NOT_OWN = [the_carry_is_y, swapped, one_memory_for_two, part_of_another, row_of_a_stack]


def run(steps: Any, cell: Any, dtype: Any) -> Any:
    c = WIDE.to(dtype).requires_grad_()
    xs = XS.to(dtype).requires_grad_()
    own = c * 1.0
    if cell in (both, swapped, one_memory_for_two, part_of_another):
        own = (own, c * 0.5)
    (last, _), ys = steps(cell, (own, torch.tensor(0)), xs)
    leaves = [*tree.tensors(last), *tree.tensors(ys)]
    loss = sum((leaf * torch.linspace(0.5, 1.5, leaf.shape[-1] if leaf.dim() else 1)).sum()
               for leaf in leaves)  # fmt: skip
    return [*leaves, *torch.autograd.grad(loss, (c, xs))]


def eager(cell: Any, init: Any, xs: Any) -> Any:
    return scan(cell, init, xs)


def compiled(cell: Any, init: Any, xs: Any) -> Any:
    return scan(cell, init, xs, compile=True)


def the_loop(cell: Any, init: Any, xs: Any) -> Any:
    return scan_loop(cell, init, xs, len(xs), False)


@pytest.mark.torch_version
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.__name__)
def test_writes_are_made_in_place(cell: Any) -> None:
    sources: list[str] = []
    write = _kept(sources, writer.LoopWriter.write)
    with fallback("error"), mock.patch.object(writer.LoopWriter, "write", write):
        found = run(eager, cell, torch.float64)
    for a, b in zip(found, run(the_loop, cell, torch.float64), strict=True):
        torch.testing.assert_close(a, b)
    assert any("_in_place(" in source for source in sources), sources


@pytest.mark.torch_version
@pytest.mark.parametrize("cell", NOT_OWN, ids=lambda cell: cell.__name__)
def test_what_is_not_the_loops_own_is_not_written_to(cell: Any) -> None:
    with fallback("error"):
        found = run(eager, cell, torch.float64)
    for a, b in zip(found, run(the_loop, cell, torch.float64), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.torch_version
def test_xs_stay_as_they_were() -> None:
    xs = torch.linspace(-1.0, 1.0, T * N * WIDTH).reshape(T, N, WIDTH)
    before = xs.clone()
    found = scan(x_itself_goes_on, WIDE, xs)
    assert torch.equal(xs, before)
    torch.testing.assert_close(found, scan_loop(x_itself_goes_on, WIDE, xs, T, False))


@pytest.mark.torch_version
def test_what_init_lends_stays_as_it_was() -> None:
    c = WIDE.clone()

    def cell(carry: Tensor, x: Tensor) -> Any:
        return carry.index_copy(0, INDEX[:1], x[None]), carry[0]

    for _ in range(2):
        scan(cell, c, XS)
        assert torch.equal(c, WIDE)


def loops_of(steps: Any, cell: Any) -> tuple[Any, list[list[int]]]:
    """The results, and for each counted loop the carries that have one buffer."""
    from torch_scan_hop.inductor import loop

    found: list[list[int]] = []
    made = loop.ScanLoop.__init__

    def noted(self: Any, *args: Any) -> None:
        made(self, *args)
        found.append(list(self.in_place))

    with mock.patch.object(loop.ScanLoop, "__init__", noted):
        return run(steps, cell, torch.float64), found


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, marks=() if cell in (write_row, shift) else pytest.mark.slow)
        for cell in CELLS
    ],
    ids=lambda cell: cell.__name__,
)
def test_compiled_loops_write_in_place(cell: Any) -> None:
    found, in_place = loops_of(compiled, cell)
    for a, b in zip(found, run(the_loop, cell, torch.float64), strict=True):
        torch.testing.assert_close(a, b)
    assert any(in_place) != (cell in NOT_A_WRITTEN_CARRY), in_place


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=() if cell is swapped else pytest.mark.slow) for cell in NOT_OWN],
    ids=lambda cell: cell.__name__,
)
def test_compiled_loops_do_not_write_to_what_is_not_their_own(cell: Any) -> None:
    found, _ = loops_of(compiled, cell)
    for a, b in zip(found, run(the_loop, cell, torch.float64), strict=True):
        torch.testing.assert_close(a, b)


# -- reads ---------------------------------------------------------------------------------------


def read_before_a_write(carry: Any, x: Tensor) -> Any:
    c, i = carry
    row = c[i].clone()
    y = row * x
    c[i] = x.sin()
    return (c, i + 1), (y, row, row)


def read_after_a_write(carry: Any, x: Tensor) -> Any:
    c, i = carry
    row = c[i].clone()
    c[i] = x.sin()
    return (c, i + 1), row * c[0].sum()


def read_into_a_carry(carry: Any, x: Tensor) -> Any:
    (c, _), i = carry
    row = c[i].clone()
    c[i] = x.sin()
    return ((c, row), i + 1), row


def read_by_a_view(carry: Any, x: Tensor) -> Any:
    c, i = carry
    part = c[i].clone()[2:9]
    c[i] = x.sin()
    return (c, i + 1), part * c[0, 0]


def read_and_written_to(carry: Any, x: Tensor) -> Any:
    c, i = carry
    block = c[i].clone()
    block[i] = x
    c[0, i] = x.cos()
    return (c, i + 1), (block.sum(), c.sum())


def read_where_it_is_written(carry: Any, x: Tensor) -> Any:
    c, i = carry
    c[i + 1] = c[i, i].clone()
    return (c, i + 1), c.sum()


#: and how many reads of a part copy it
READS = {
    read_before_a_write: 0,
    read_after_a_write: 1,
    read_into_a_carry: 1,
    read_by_a_view: 1,
    read_and_written_to: 1,
    read_where_it_is_written: 1,
}


@pytest.mark.torch_version
@pytest.mark.parametrize("cell", READS, ids=lambda cell: cell.__name__)
def test_parts_are_read_where_they_lie_or_copied(cell: Any) -> None:
    copies: list[Any] = []
    shape = (40, N, WIDTH) if cell is read_and_written_to else (200, 1000)
    # of a smaller carry, parts are read after the loop, from a stack of all carries
    wide = torch.linspace(0.0, 1.0, math.prod(shape)).reshape(shape).sin()
    init: Any = (wide, wide[0]) if cell is read_into_a_carry else wide
    xs, i = torch.linspace(-1.0, 1.0, 30 * shape[-1]).reshape(30, -1), torch.tensor(-N)
    with fallback("error"), mock.patch.object(calls, "_part_at", _noting(copies, calls._part_at)):
        found = scan(cell, (init, i), xs)
    assert len(copies) == len(xs) * READS[cell]
    copied = tree.unflatten(init, [leaf.clone() for leaf in tree.tensors(init)])
    expected = scan_loop(cell, (copied, i), xs, len(xs), False)
    for a, b in zip(tree.tensors(found), tree.tensors(expected), strict=True):
        assert torch.equal(a, b)


# -- memory --------------------------------------------------------------------------------------


def _summed(c: Tensor, x: Tensor) -> Any:
    return c.index_add_(0, INDEX, x.expand(3, -1)), c[3].exp().sum()


PROGRAMS = {
    **{name: (body, init_of, xs_of()) for name, (body, init_of, xs_of) in BODIES.items()},
    "summed": (_summed, lambda c: c.view(1000, 200), torch.ones(150, 200)),
}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_more_memory_than_the_loop(name: str, backward: bool) -> None:
    """A large state is copied for no step; a few copies of it stand for what the loop has."""
    cell, init_of, xs = PROGRAMS[name]

    def peak(steps: Any) -> int:
        def call() -> None:
            start = torch.zeros(ENTRIES, requires_grad=backward)
            carry, ys = steps(cell, init_of(start * 1.0), xs)
            if backward:
                (tree.tensors(carry)[0].sum() + ys.sum()).backward()

        call()
        return peak_of_allocator(call)

    assert peak(eager) <= 1.2 * peak(the_loop)


@pytest.mark.parametrize("start", [0, -N])
def test_integers_are_no_indices_of_many_places(start):
    """A row, or one entry, is a view, as it is in Python; other indices stay the operator's."""

    def cell(carry: Any, x: Tensor) -> Any:
        c, i = carry
        c[i] = x * c[i].clone()
        c[i, i + 1] = c[i, i] + c[i + 1, i - 1].sin()
        return (c, i + 1), (c[i][INDEX], c.T[i].sum())

    sources: list[str] = []
    writes: list[Any] = []
    with (
        mock.patch.object(writer.LoopWriter, "write", _kept(sources, writer.LoopWriter.write)),
        mock.patch.object(calls, "write_part_at", _noting(writes, calls.write_part_at)),
    ):
        got = scan(cell, (WIDE, torch.tensor(start)), XS)
    assert sources[-1].count("[(") >= 3, sources
    assert len(writes) == 2 * T
    expected = scan_loop(cell, (WIDE.clone(), torch.tensor(start)), XS, T, False)
    for a, b in zip(tree.tensors(got), tree.tensors(expected), strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(IndexError, match="out of"):
        scan(cell, (WIDE, torch.tensor(N - 3)), XS)


def _noting(found: list[Any], call: Any) -> Any:
    def noted(*args: Any) -> Any:
        found.append(args)
        return call(*args)

    return noted


def _kept(found: list[Any], call: Any) -> Any:
    def kept(*args: Any) -> Any:
        found.append(call(*args))
        return found[-1]

    return kept
