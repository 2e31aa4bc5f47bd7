"""Every operator that is written out as scalars: its entries are those of torch's result.

For every dimension of every argument that may hold the lanes: all of it, or its outer part. A
rule may refuse a place, and says so; what it does not refuse is to be right.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from test_batchable import (
    POINTWISE,
    POINTWISE_KINDS,
    index,
    leaves_of,
    pointwise_arguments,
    real,
)
from torch.fx.experimental.proxy_tensor import make_fx

from torch_scan_hop.body.cofactors import cofactors
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.decompositions import MATRICES, in_parts
from torch_scan_hop.inductor.scalars.arithmetic import is_pointwise
from torch_scan_hop.inductor.scalars.entries import Entries, Lanes, indices
from torch_scan_hop.inductor.scalars.interpreter import RULES, ScalarInterpreter

pytestmark = pytest.mark.torch_version

aten, prims = torch.ops.aten, torch.ops.prims

m34, m43, b234, b245 = real(3, 4), real(4, 3), real(2, 3, 4), real(2, 4, 5)
b432, v4 = real(4, 3, 2), real(4)
mask = b234 > 0.5
scalar = torch.tensor(0.3, dtype=torch.float64)


def well_conditioned(*shape):
    n = shape[-1]
    noise = real(*shape).roll(1, -1)  # the largest of a column is not on the diagonal
    return noise + torch.eye(n, dtype=torch.float64).roll(1, 0) * n


def definite(*shape):
    a = well_conditioned(*shape)
    return a @ a.mT + torch.eye(shape[-1], dtype=torch.float64)


S3, S233, S4233 = (well_conditioned(*shape) for shape in ((3, 3), (2, 3, 3), (4, 2, 3, 3)))
D233, D2233 = definite(2, 3, 3), definite(2, 2, 3, 3)
LU, PIVOTS = torch.linalg.lu_factor(S233)


def call(*args, **kwargs):
    return args, kwargs


#: arguments for each operator that has a rule of its own
SAMPLES = {
    aten.alias.default: [call(m34)],
    aten.cat.default: [
        call([m34, real(2, 4)]),
        call([m34, real(3, 2)], 1),
        call([b234, b234 + 1], -2),
        call([real(0), m34]),
        call([m34, index(3, 4)]),
    ],
    aten.clone.default: [call(m34), call(m34, memory_format=torch.contiguous_format)],
    aten.detach.default: [call(m34)],
    aten.diagonal.default: [
        call(m34),
        call(m43, -1),
        call(b234, 1, 0, 2),
        call(b234, -1, -1, 1),
        call(b432, 1, 1, 0),
    ],
    aten.diagonal_scatter.default: [
        call(m34, real(3)),
        call(b234, real(2, 2), -1, 1, 2),
        call(b234, real(3, 2), 1, 0, 2),
        call(b432, real(2, 3), 0, 0, 1),
        call(b432, real(2, 3), 0, 1, 0),
    ],
    aten.expand.default: [
        call(real(1, 4), [3, 4]),
        call(v4, [2, -1]),
        call(real(2, 1, 4), [2, 3, -1]),
        call(m34, [2, 3, 4]),
        call(real(1), [4]),
        call(scalar, [2, 3]),
    ],
    aten.flip.default: [call(b234, [0]), call(b234, [-1, 1]), call(m34, [])],
    aten.permute.default: [call(b234, [2, 0, 1]), call(b234, [-1, 0, 1])],
    aten.reshape.default: [
        call(m34, [12]),
        call(m34, [2, -1]),
        call(b234, [6, 4]),
        call(b234, [2, 12]),
        call(b432, [2, 2, 6]),
        call(b432, [8, 3]),
    ],
    aten.select.int: [call(b234, 1, 2), call(b234, -1, -1), call(b432, 0, -3)],
    aten.select_scatter.default: [
        call(b234, real(2, 4), 1, 2),
        call(b234, real(2, 3), -1, -1),
        call(real(3, 3, 2), real(3, 2), 0, 1),
        call(real(3, 3, 3), real(3, 3), 2, 1),
    ],
    aten.slice.Tensor: [
        call(b234, 1, 1),
        call(b234, 2, -2, 9, 1),
        call(b234, 2, 0, 4, 3),
        call(b234, -1, None, None, 2),
        call(b234, 1, 1, 2**63 - 1),
    ],
    aten.slice_scatter.default: [
        call(b234, real(2, 2, 4), 1, 1),
        call(b234, real(2, 3, 2), 2, 0, 4, 2),
        call(b234, real(2, 3, 2), -1, -3, -1),
        call(real(2, 2, 2), real(2, 1, 2), 1, 1, 2),
    ],
    aten.split_with_sizes.default: [
        call(m34, [1, 3], 1),
        call(b432, [1, 3]),
        call(b234, [1, 2], -2),
    ],
    aten.squeeze.default: [call(real(1, 3, 1)), call(real(3, 1, 4))],
    aten.squeeze.dim: [call(real(1, 3, 1), 0), call(real(1, 3, 1), -1), call(m34, 1)],
    aten.squeeze.dims: [call(real(1, 3, 1), [0, 2]), call(real(3, 1, 4), [0, 1])],
    aten.t.default: [call(m34), call(real(3))],
    aten.transpose.int: [call(b234, 0, 2), call(b234, -1, 1), call(scalar, 0, -1)],
    aten.unsqueeze.default: [call(m34, 0), call(m34, -1), call(m34, 1)],
    aten.view.default: [call(m34, [2, 6]), call(m34, [-1]), call(b432, [2, 2, 3, 2])],
    aten._unsafe_view.default: [call(m34, [2, 6]), call(b234, [6, 4])],
    prims.rev.default: [call(b234, [0, 2])],
    aten.amax.default: [call(m34, [1]), call(b234, [0, 2], True), call(m34), call(scalar)],
    aten.amin.default: [call(m34, [1]), call(b234, [-1, 1], True), call(m34)],
    aten.any.default: [call(mask), call(b234)],
    aten.any.dim: [call(mask, 1), call(mask, -1, True)],
    aten.any.dims: [call(mask, [0, 2])],
    aten.mean.default: [call(b234)],
    aten.mean.dim: [call(m34, [1]), call(b234, [0, -1], True), call(m34, None)],
    aten.prod.dim_int: [call(b234, 1), call(b234, -1, True)],
    aten.sum.default: [call(b234), call(mask), call(index(3, 4))],
    aten.sum.dim_IntList: [
        call(m34, [1]),
        call(b234, [0, -1], True),
        call(m34, None),
        call(mask, [1]),
        call(m34, [1], dtype=torch.float32),
    ],
    aten._to_copy.default: [call(m34, dtype=torch.float32), call(index(3), dtype=torch.bool)],
    aten.addmm.default: [
        call(real(3, 5), m34, real(4, 5)),
        call(real(5), m34, real(4, 5), beta=0.5, alpha=2),
        call(real(3, 1), m34, real(4, 5)),
    ],
    aten.baddbmm.default: [call(real(2, 3, 5), b234, b245), call(real(5), b234, b245, beta=2)],
    aten.bmm.default: [call(b234, b245), call(real(3, 3, 3), real(3, 3, 3) + 1)],
    aten.full.default: [call([3, 4], 2.5, dtype=torch.float64), call([], True, dtype=torch.bool)],
    aten.full_like.default: [call(m34, 2.0), call(m34, 2.0, dtype=torch.int64)],
    aten.mm.default: [call(m34, real(4, 5)), call(real(2, 2), real(2, 2) + 1)],
    aten.ones_like.default: [call(m34), call(m34, dtype=torch.bool)],
    aten.zeros_like.default: [call(m34), call(index(3))],
    prims.convert_element_type.default: [call(m34, torch.float32), call(mask, torch.float64)],
    prims.iota.default: [
        call(5, start=2, step=3, dtype=torch.int64, device=torch.device("cpu"), requires_grad=False)
    ],
    aten.cholesky_solve.default: [
        call(real(2, 3, 2), torch.linalg.cholesky(D233)),
        call(real(2, 3, 2), torch.linalg.cholesky(D233).mT.contiguous(), True),
        call(real(2, 2, 3, 1), torch.linalg.cholesky(D2233)),
    ],
    aten.linalg_cholesky_ex.default: [
        call(D233),
        call(D233, upper=True),
        call(D2233),
        call(D233[0]),
    ],
    aten.linalg_inv_ex.default: [call(S3), call(S233), call(S4233)],
    aten.linalg_lu_factor_ex.default: [call(S3), call(S233), call(S4233)],
    aten.linalg_lu_solve.default: [
        call(LU, PIVOTS, real(2, 3, 2)),
        call(LU, PIVOTS, real(2, 3, 2), adjoint=True),
        call(LU, PIVOTS, real(2, 2, 3), left=False),
        call(LU, PIVOTS, real(2, 2, 3), left=False, adjoint=True),
        call(LU[0], PIVOTS[0], real(3, 2)),
    ],
    aten.linalg_solve_triangular.default: [
        call(S233 * 0.2 + torch.eye(3).double(), right, upper=upper, left=left, unitriangular=unit)
        for upper in (False, True)
        for left, right in ((True, real(2, 3, 4)), (False, real(2, 4, 3)))
        for unit in (False, True)
    ]
    + [call(D2233, real(3, 1), upper=True), call(D233[0], real(2, 3, 1), upper=False)],
    aten._linalg_det.default: [
        call(well_conditioned(2, 2)),  # one exchange of rows
        call(S3),
        call(S233),
        call(S4233),
        call(S233 * 0),
    ],
    cofactors: [call(well_conditioned(2, 2)), call(S3), call(S4233), call(S233 * 0)],
    aten._linalg_slogdet.default: [
        call(well_conditioned(2, 2)),  # one exchange of rows
        call(S3),
        call(S233),
        call(S4233),
        call(S233 * 0),
    ],
    aten._linalg_solve_ex.default: [
        call(S233, real(2, 3, 2)),
        call(S233, real(2, 3)),
        call(S233, real(2, 2, 3), left=False),
        call(S3, real(3)),
        call(S3, real(3, 2)),
        call(S4233, real(2, 3, 2)),
    ],
}

#: which results, where not all of them are written out
RESULTS = {
    aten._linalg_det.default: [0],
    aten._linalg_slogdet.default: [0, 1],
    aten._linalg_solve_ex.default: [0, 3],
}


def entries_of(tensor, lane, n_lanes):
    """By the definition of ``Entries``."""
    shape = [n // n_lanes if d == lane else n for d, n in enumerate(tensor.shape)]

    def entry(at):
        if lane is None:
            return tensor[at].reshape(1)
        return tensor[(*at[:lane], slice(at[lane], None, shape[lane]), *at[lane + 1 :])]

    return Entries(tuple(shape), [*map(entry, indices(shape))], lane).of_rank(tensor.ndim)


def tensor_of(entries, n_lanes):
    """The inverse."""
    lanes = 1 if entries.lane is None else n_lanes
    whole = torch.empty(
        [n * lanes if d == entries.lane else n for d, n in enumerate(entries.shape)]
    )
    whole = whole.to(entries.dtype)
    for at, value in zip(indices(entries.shape), entries.flat, strict=True):
        if entries.lane is None:
            whole[at] = value.reshape(())
        else:
            d = entries.lane
            whole[(*at[:d], slice(at[d], None, entries.shape[d]), *at[d + 1 :])] = value
    return whole


def places(tensors):
    """(number of lanes, a place in each tensor), of all that there may be; first that of none."""
    yield 1, [None] * len(tensors)
    sizes = {n for t in tensors for n in t.shape}
    for n_lanes in sorted({d for n in sizes for d in range(2, n + 1) if n % d == 0}):
        choices = [
            [None, *(d for d, n in enumerate(t.shape) if n and n % n_lanes == 0)] for t in tensors
        ]
        for found in itertools.product(*choices):
            if any(d is not None for d in found):
                yield n_lanes, list(found)


def of_tensors(op, args, kwargs):
    """A function of the tensors among the arguments, and these; its results in a tuple."""
    tensors, rebuild = leaves_of((args, kwargs))

    def run(*tensors):
        args, kwargs = rebuild(tensors)
        results = op(*args, **kwargs)
        if op in RESULTS:
            return tuple(results[k] for k in RESULTS[op])
        return results if isinstance(results, (tuple, list)) else (results,)

    return run, tensors


def traced(run, tensors):
    body = make_fx(run, tracing_mode="fake")(*tensors)
    body.graph.eliminate_dead_code()  # results that nothing reads
    return in_parts(body)


def count_of_right_places(op, args, kwargs):
    """With lanes; wrong ones raise."""
    run, tensors = of_tensors(op, args, kwargs)
    body, want, count = traced(run, tensors), run(*tensors), 0
    for n_lanes, lanes in places(tensors):
        interpreter = ScalarInterpreter(body, Lanes(None if n_lanes == 1 else n_lanes))
        given = [entries_of(t, d, n_lanes) for t, d in zip(tensors, lanes, strict=True)]
        try:
            got = interpreter.run(*given, enable_io_processing=False)
        except Refusal:
            continue
        for found, expected in zip(got, want, strict=True):
            torch.testing.assert_close(
                tensor_of(found, n_lanes),
                expected,
                equal_nan=True,
                msg=lambda m, at=(n_lanes, lanes): f"{at[0]} lanes, in dimensions {at[1]}: {m}",
            )
        count += n_lanes > 1
    return count


#: which have no lanes, or are numbers of all of them
WITHOUT_LANES = {
    aten.full.default,
    aten.t.default,
    prims.iota.default,
    aten.sum.default,
    aten.mean.default,
    aten.any.default,
    cofactors,  # lanes need the sides of its solve to be theirs
}


@pytest.mark.parametrize("op", SAMPLES, ids=str)
def test_a_rule(op):
    counts = [count_of_right_places(op, *arguments) for arguments in SAMPLES[op]]
    assert any(counts) or op in WITHOUT_LANES


def test_every_rule_has_samples():
    assert SAMPLES.keys() == RULES.keys() | MATRICES.keys()


@pytest.mark.parametrize(
    "name", [n for n, op in sorted(POINTWISE.items()) if is_pointwise(op) and op not in RULES]
)
def test_a_pointwise_operator(name):
    op = POINTWISE[name]
    counts = []
    for make in POINTWISE_KINDS.values():
        args = pointwise_arguments(op, make)
        try:
            op(*args)
            body = traced(*of_tensors(op, args, {}))
        except Exception:  # not for arguments of this kind
            continue
        if not body.graph.find_nodes(op="call_function", target=op):
            pytest.skip("made of other operators, on this torch")
        counts.append(count_of_right_places(op, args, {}))
    assert any(counts)
