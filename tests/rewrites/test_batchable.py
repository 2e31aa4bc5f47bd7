"""Every operator that rewrites may batch over steps: ``vmap`` of it is the loop of it.

For every pattern of batched and unbatched arguments, with torch's slow fallback switched off: an
operator without a rule of its own is not batched.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from oracle import loop
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from torch_scan_hop import scan
from torch_scan_hop._torch.transforms import over_first_dimension
from torch_scan_hop.rewrites.batchable import (
    FOR_ONE_TRIP_COUNT,
    NAMED,
    STAND_INS,
    is_batchable,
    is_batchable_operator,
    stand_in_for,
)
from torch_scan_hop.rewrites.costs import Costs

pytestmark = pytest.mark.torch_version

aten = torch.ops.aten
T = 3


def real(*shape):
    generator = torch.Generator().manual_seed(len(shape))
    return torch.rand(*shape, dtype=torch.float64, generator=generator) * 0.8 + 0.1


def index(*shape, below=3):
    return torch.arange(max(1, torch.Size(shape).numel())).remainder(below).reshape(shape)


m34, m45, b234, b245 = real(3, 4), real(4, 5), real(2, 3, 4), real(2, 4, 5)
image, kernel = real(2, 3, 5, 5), real(4, 3, 2, 2)
norm = (real(2, 3, 4), [4], real(4), real(4), 1e-5)

spd = torch.eye(3, dtype=torch.float64).mul(3) + real(3, 3) @ real(3, 3).mT
many = torch.stack([spd, spd + torch.eye(3)])
lower, (lu, pivots) = torch.linalg.cholesky(spd), torch.linalg.lu_factor(spd)
low = torch.linalg.cholesky(many)

#: arguments for each overload that is named in ``batchable``, pointwise operators aside
SAMPLES = {
    "alias.default": [(m34,)],
    "detach.default": [(m34,)],
    "diagonal.default": [(m34,), (b234, 1, 0, 2)],
    "expand.default": [(real(1, 4), [3, 4]), (real(4), [2, -1])],
    "permute.default": [(b234, [2, 0, 1]), (b234, [-1, 0, 1])],
    "reshape.default": [(m34, [12]), (m34.t(), [2, -1]), (b234, [6, 4])],
    "_reshape_alias.default": [(m34, [12], [1])],
    "select.int": [(b234, 1, 2), (b234, -1, -1)],
    "slice.Tensor": [(b234, 1, 1), (b234, 2, -2, 9, 1), (b234, 0, 0, 2, 2)],
    "split.Tensor": [(m34, 2), (m34, 2, -1)],
    "split_with_sizes.default": [(m34, [1, 3], 1)],
    "squeeze.default": [(real(1, 3, 1),)],
    "squeeze.dim": [(real(1, 3, 1), 0), (real(1, 3, 1), -1), (m34, 1)],
    "squeeze.dims": [(real(1, 3, 1), [0, 2])],
    "t.default": [(m34,), (real(3),)],
    "transpose.int": [(b234, 0, 2), (b234, -1, 1)],
    "unbind.int": [(m34,), (m34, 1)],
    "unfold.default": [(m34, 1, 2, 1)],
    "unsqueeze.default": [(m34, 0), (m34, -1)],
    "view.default": [(m34, [2, 6]), (m34, [-1])],
    "_unsafe_view.default": [(m34, [2, 6])],
    "all.default": [(m34 > 0.3,)],
    "all.dim": [(m34 > 0.3, 1), (m34 > 0.3, 0, True)],
    "amax.default": [(m34, [1]), (b234, [0, 2], True), (m34,)],
    "amin.default": [(m34, [1]), (b234, [0, 2], True), (m34,)],
    "any.default": [(m34 > 0.8,)],
    "any.dim": [(m34 > 0.8, 1), (m34 > 0.8, 0, True)],
    "argmax.default": [(m34,), (m34, 1), (m34, 0, True)],
    "argmin.default": [(m34,), (m34, 1), (m34, 0, True)],
    "cumprod.default": [(m34, 1), (m34, 0)],
    "cumsum.default": [(m34, 1), (m34, -2)],
    "logsumexp.default": [(m34, [1]), (b234, [0, -1], True)],
    "max.dim": [(m34, 1), (m34, 0, True)],
    "mean.default": [(m34,)],
    "mean.dim": [(m34, [1]), (b234, [0, -1], True), (m34, None)],
    "min.dim": [(m34, 1), (m34, 0, True)],
    "prod.default": [(m34,)],
    "prod.dim_int": [(m34, 1), (m34, 0, True)],
    "sum.default": [(m34,), (m34 > 0.3,)],
    "sum.dim_IntList": [(m34, [1]), (b234, [0, -1], True), (m34, None)],
    "var.correction": [(m34, [1]), (b234, [0, -1])],
    "var_mean.correction": [(m34, [1]), (b234, [0, -1])],
    "_softmax.default": [(m34, 1, False), (m34, 0, False)],
    "_log_softmax.default": [(m34, 1, False), (m34, -2, False)],
    "_softmax_backward_data.default": [(m34, m34.softmax(1), 1, torch.float64)],
    "_log_softmax_backward_data.default": [(m34, m34.log_softmax(1), 1, torch.float64)],
    "linalg_vector_norm.default": [(m34,), (m34, 2, [1]), (b234, 1.5, [0, 2], True)],
    "addmm.default": [(real(3, 5), m34, m45), (real(5), m34, m45), (real(1, 1), m34, m45)],
    "baddbmm.default": [(real(2, 3, 5), b234, b245)],
    "bmm.default": [(b234, b245)],
    "dot.default": [(real(4), real(4) + 1)],
    "mm.default": [(m34, m45), (m34, real(5, 4).t())],
    "mv.default": [(m34, real(4))],
    "convolution.default": [
        (image, kernel, real(4), [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        (image, kernel, None, [1, 1], [1, 0], [1, 1], False, [0, 0], 1),
    ],
    "cat.default": [([m34, real(2, 4)],), ([m34, real(3, 2)], 1), ([m34, real(3, 2)], -1)],
    "stack.default": [([m34, m34 + 1],), ([m34, m34 + 1], -1)],
    "flip.default": [(b234, [0]), (b234, [-1, 1])],
    "roll.default": [(b234, [1], [0]), (b234, [1, 2], [-1, 1]), (b234, [2])],
    "constant_pad_nd.default": [(m34, [1, 2], 0.5), (b234, [0, 1, 1, 0])],
    "tril.default": [(m34,), (b234, -1)],
    "triu.default": [(m34, 1)],
    "repeat.default": [(m34, [2, 1]), (real(4), [2, 3])],
    "_linalg_det.default": [(spd,), (many,)],
    "linalg_matrix_exp.default": [(spd,), (many,), (spd * 8,)],
    "_linalg_slogdet.default": [(spd,), (many,)],
    "_linalg_solve_ex.default": [(spd, real(3)), (spd, real(3, 2)), (many, real(2, 3, 1))],
    "cholesky_solve.default": [(real(3, 2), lower), (real(2, 3, 1), low)],
    "linalg_cholesky_ex.default": [(spd,), (many,)],
    "linalg_inv_ex.default": [(spd,), (many,)],
    "linalg_lu_factor_ex.default": [(spd,), (many,)],
    "linalg_lu_solve.default": [(lu, pivots, real(3, 2))],
    "embedding.default": [(m34, index(5)), (m34, index(2, 2))],
    "gather.default": [(m34, 0, index(2, 4)), (m34, 1, index(3, 2))],
    "index_select.default": [(m34, 0, index(5)), (m34, 1, index(2))],
    "scatter.src": [(m34, 0, index(2, 4), real(2, 4)), (m34, 1, index(3, 2), real(3, 3))],
    "scatter.value": [(m34, 0, index(2, 4), 2.0), (m34, 1, index(3, 2), 2.0)],
    "scatter_add.default": [(m34, 0, index(2, 4), real(2, 4)), (m34, 1, index(3, 5), real(3, 5))],
    "select_backward.default": [(real(2, 4), [2, 3, 4], 1, 2)],
    "slice_backward.default": [(real(2, 2, 4), [2, 3, 4], 1, 0, 2, 1)],
    "native_layer_norm.default": [norm, (norm[0], [3, 4], None, None, 1e-5)],
    "cummax.default": [(m34 - 0.5, 1)],
    "logcumsumexp.default": [(m34, 1), (m34, 0)],
    "sort.default": [(m34.sin(), 1), (m34, 0, True)],
    "topk.default": [(m34.sin(), 2), (m34, 2, 0)],
    "_prelu_kernel.default": [(m34 - 0.5, real(1, 4))],
    "_prelu_kernel_backward.default": [(m34, m34 - 0.5, real(1, 4))],
    "elu_backward.default": [
        (m34, 0.7, 1.1, 1.2, False, m34 - 0.5),
        (m34, 0.7, 1.1, 1.2, True, m34 - 0.5),
    ],
    "glu.default": [(m34, 1), (m34, -1)],
    "hardsigmoid_backward.default": [(m34, 9 * m34 - 4)],
    "hardswish.default": [(9 * m34 - 4,)],
    "hardswish_backward.default": [(m34, 9 * m34 - 4)],
    "hardtanh_backward.default": [(m34, m34, 0.2, 0.6)],
    "leaky_relu_backward.default": [(m34, m34 - 0.5, 0.1, False)],
    "log_sigmoid_backward.default": [(m34, m34 - 0.5, m34)],
    "log_sigmoid_forward.default": [(m34 - 0.5,)],
    "smooth_l1_loss_backward.default": [(m34, m34, m34 + 0.1, 0, 0.2)],
    "softplus_backward.default": [(m34, m34, 1.5, 0.8)],
    "clone.default": [(m34,)],
    "full_like.default": [(m34, 2.0)],
    "new_full.default": [(m34, [2, 3], 2.0)],
    "new_ones.default": [(m34, [2, 3])],
    "new_zeros.default": [(m34, [2, 3])],
    "ones_like.default": [(m34,)],
    "zeros_like.default": [(m34,)],
    "_to_copy.default": [(m34,)],
    "view_as_real.default": [(torch.complex(m34, m34),)],
    "view_as_complex.default": [(real(3, 2),)],
    "clamp.default": [(m34, 0.3), (m34, None, 0.5), (m34, 0.3, 0.5)],
    "clamp.Tensor": [(m34, m34 * 0.9), (m34, None, real(4)), (m34, real(4), real(4) + 0.1)],
    "clip.default": [(m34, 0.3, 0.5)],
    "clip.Tensor": [(m34, real(4), None)],
}

POINTWISE_KINDS = {
    "float": lambda k: m34.roll(k, 0),
    "int": lambda k: index(3, 4).roll(k, 1) + 1,
    "bool": lambda k: m34.roll(k, 0) > 0.4,
    "complex": lambda k: torch.complex(m34.roll(k, 0), m34 + 0.1),
    "mask first": lambda k: m34 > 0.4 if k == 0 else m34.roll(k, 0),
    "mask second": lambda k: m34 > 0.4 if k == 1 else m34.roll(k, 0),
}


def overloads():
    for name in sorted(dir(aten)):
        packet = getattr(aten, name)
        for overload in getattr(packet, "overloads", list)():
            yield f"{name}.{overload}", getattr(packet, overload)


BATCHABLE = {name: op for name, op in overloads() if is_batchable_operator(op)}
POINTWISE = {n: op for n, op in BATCHABLE.items() if op not in NAMED and op not in STAND_INS}


def pointwise_arguments(op, make):
    """From the schema: tensors of one kind, 0.5 or 2 for numbers without a default."""
    number = 0.5 if make(1).dtype in (torch.float64, torch.complex128) else 2
    defaults = {"number": number, "Scalar": number, "float": number, "int": 1, "bool": True}
    args, n_tensors = [], 0
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor" or (kind == "Optional[Tensor]" and argument.name == "min"):
            args.append(make(n_tensors))
            n_tensors += 1
        elif argument.has_default_value():
            break
        elif kind in defaults:
            args.append(defaults[kind])
        elif kind == "Optional[number]":
            args.append(number)
        else:
            args.append(None)
    return tuple(args)


def leaves_of(args):
    """(tensors, rebuild): tensors among the arguments and in lists of them."""
    flat, spec = torch.utils._pytree.tree_flatten(args)
    places = [k for k, leaf in enumerate(flat) if isinstance(leaf, Tensor)]

    def rebuild(tensors):
        leaves = list(flat)
        for k, tensor in zip(places, tensors, strict=True):
            leaves[k] = tensor
        return torch.utils._pytree.tree_unflatten(leaves, spec)

    return [flat[k] for k in places], rebuild


def step_of(tensor, k):
    """Another value of the same kind for step ``k``."""
    return tensor.roll(k, tuple(range(tensor.ndim))[-1:]) if tensor.ndim else tensor


def compare_with_loop(op, args, **options):
    tensors, rebuild = leaves_of(args)
    for pattern in itertools.product((0, None), repeat=len(tensors)):
        if not any(p == 0 for p in pattern):
            continue
        rows = [
            [step_of(t, k) if p == 0 else t for t, p in zip(tensors, pattern, strict=True)]
            for k in range(T)
        ]
        stacks = [
            torch.stack([row[n] for row in rows]) if p == 0 else t
            for n, (t, p) in enumerate(zip(tensors, pattern, strict=True))
        ]
        call = lambda *values: op(*rebuild(values), **options)  # noqa: E731
        got = torch.vmap(call, in_dims=pattern)(*stacks)
        expected = [call(*row) for row in rows]
        many = isinstance(got, (tuple, list))
        pairs = zip(got, zip(*expected, strict=True), strict=True) if many else [(got, expected)]
        for batched, steps in pairs:
            torch.testing.assert_close(batched, torch.stack(steps), equal_nan=True)


def fixes_the_trip_count(op, args):
    """Whether a trace for any number of steps becomes one for the number that it is traced with."""
    tensors, rebuild = leaves_of(args)
    found = set()
    for stacked in itertools.product((True, False), repeat=len(tensors)):
        if not any(stacked):
            continue
        env = ShapeEnv(duck_shape=False)
        source = ConstantSource("trip_count")
        symbol = env.create_symbol(11, source, DimDynamic.DYNAMIC)
        trip_count = env.create_symintnode(symbol, hint=11, source=source)
        with FakeTensorMode(shape_env=env), enable_python_dispatcher():
            fakes = [
                torch.empty((trip_count, *t.shape) if s else t.shape, dtype=t.dtype)
                for t, s in zip(tensors, stacked, strict=True)
            ]

            def call(*values):
                result = op(*rebuild(list(values)))
                return result if isinstance(result, (tuple, list)) else (result,)

            over_first_dimension(call, fakes, stacked, trip_count)
        found.add(bool(env.replacements or env.guards))
    return True in found


@pytest.fixture(autouse=True)
def _no_fallback():
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(True)


@pytest.mark.parametrize("name", sorted(n for n in SAMPLES if n in dict(overloads())))
def test_a_named_operator(name):
    for args in SAMPLES[name]:
        compare_with_loop(BATCHABLE[name], args)
    fixes = any(fixes_the_trip_count(BATCHABLE[name], args) for args in SAMPLES[name])
    assert fixes == (BATCHABLE[name] in FOR_ONE_TRIP_COUNT)


BY_INDEX = {
    "index.Tensor": [
        (m34, [index(5)]),
        (m34, [None, index(2)]),
        (m34, [index(2), index(2)]),
        (b234, [index(2, below=2), None, index(2)]),
        (b234, [None, index(2, 2), index(2)]),
        (b234, [index()]),
        (b234, [None, None, index()]),
        (b234, [index(), None, index()]),
    ],
    "index_put.default": [
        (m34, [index(2)], real(2, 4)),
        (m34, [index(5)], real(5, 4), True),
        (m34, [None, index(2)], real(3, 2)),
        (m34, [None, index(5)], real(1), True),
        (m34, [index(2), index(2)], real(2), True),
        (b234, [index(2, below=2), None, index(2)], real(2, 3), True),
        (b234, [index()], real(3, 4)),
        (b234, [None, None, index()], real(2, 3)),
        (b234, [index(), None, index()], real(3), True),
    ],
}


@pytest.mark.parametrize("name,args", [(n, a) for n in BY_INDEX for a in BY_INDEX[n]], ids=str)
def test_an_operator_that_takes_indices(name, args):
    compare_with_loop(dict(overloads())[name], args)
    assert not fixes_the_trip_count(dict(overloads())[name], args)


@pytest.mark.parametrize(
    "name,args", [("prepare_softmax_online", (b234, -1)), ("fma", (m34, real(4), m34 + 1))]
)
def test_an_operator_of_inductor(name, args):
    """What stands in for it is the loop of it."""
    from torch._inductor import inductor_prims  # noqa: F401  which defines it

    packet = getattr(torch.ops.prims, name, None)
    if packet is None:
        pytest.skip("this torch has no such operator")
    assert is_batchable_operator(packet.default)
    compare_with_loop(stand_in_for(packet.default), args)
    torch.testing.assert_close(stand_in_for(packet.default)(*args), packet.default(*args))


KEYWORDS = {
    "linalg_solve_triangular.default": ((low, real(2, 3, 2)), {"upper": False}),
    "div.Scalar_mode": ((m34, 0.3), {"rounding_mode": "floor"}),
    "div.Tensor_mode": ((m34, real(4)), {"rounding_mode": "trunc"}),
    "round.decimals": ((m34,), {"decimals": 1}),
}


@pytest.mark.parametrize("name", sorted(KEYWORDS))
def test_an_operator_with_keywords(name):
    args, options = KEYWORDS[name]
    compare_with_loop(BATCHABLE[name], args, **options)


def test_every_named_operator_has_samples():
    assert {*SAMPLES, *KEYWORDS} == {str(op).removeprefix("aten.") for op in NAMED}


def test_operators_without_a_rule_have_one_that_stands_in():
    z = torch.complex(m34, m34 + 1)
    convert, conjugate, _, select_scatter, slice_scatter, *_ = STAND_INS.values()
    for args in (
        (b234, real(2, 2, 4), 1, 1),
        (b234, real(2, 2, 4), 1, 1, 2**63 - 1),
        (b234, real(2, 3, 2), 2, 0, 4, 2),
        (b234, real(2, 3, 2), -1, -3, -1),
        (b234, real(2, 0, 4), 1, 2, 1),
        (b234, real(1, 3, 4), 0, None, 1),
    ):
        compare_with_loop(slice_scatter, args)
        assert torch.equal(slice_scatter(*args), aten.slice_scatter(*args))
    for args in ((b234, real(2, 4), 1, 2), (b234, real(2, 3), -1, -1), (b234, real(3, 4), 0, -2)):
        compare_with_loop(select_scatter, args)
        assert torch.equal(select_scatter(*args), aten.select_scatter(*args))
    compare_with_loop(conjugate, (z,))
    compare_with_loop(conjugate, (m34,))
    compare_with_loop(lambda v: convert(v, torch.float32), (m34,))
    assert torch.equal(conjugate(z), z.conj()) and convert(m34, torch.int64).dtype == torch.int64


@pytest.mark.parametrize("write", [aten.select_scatter.default, aten.slice_scatter.default])
def test_slices_are_written_without_indices(write):
    """torch's rules scatter. Of two such gradients, Inductor of torch 2.13 gave other numbers."""
    part = real(2, 4) if write is aten.select_scatter.default else real(2, 1, 4)
    batched = torch.vmap(lambda whole, part: STAND_INS[write](whole, part, 1, 2))
    args = torch.stack([b234, b234 + 1]), torch.stack([part, part + 1])
    traced = make_fx(batched)(*args)
    assert not [n for n in traced.graph.nodes if "scatter" in str(n.target)]
    want = [write(whole, part, 1, 2) for whole, part in zip(*args, strict=True)]
    assert torch.equal(traced(*args), torch.stack(want))


@pytest.mark.parametrize("name", sorted(POINTWISE))
def test_a_pointwise_operator(name):
    op, tried = POINTWISE[name], 0
    for kind, make in POINTWISE_KINDS.items():
        args = pointwise_arguments(op, make)
        try:
            op(*args)
        except Exception:  # not for arguments of this kind
            continue
        tried += 1
        compare_with_loop(op, args)
        if kind != "bool":  # of which some operators' fakes say that they take none
            assert fixes_the_trip_count(op, args) == (op in FOR_ONE_TRIP_COUNT)
    assert tried, "no arguments for this operator: name it as not batchable"


#: operators of a tensor and a scalar of another dtype, for which vmap lets the scalar decide
OF_SCALARS = [
    lambda v, s: torch.where(v > 0, v, s),
    lambda v, s: torch.clamp(v, -s, s),
    lambda v, s: torch.clamp(v, min=s),
    lambda v, s: torch.clamp_max(v, s),
    lambda v, s: torch.addcmul(v, v, s),
    lambda v, s: torch.addcdiv(v, v, s),
    lambda v, s: torch.lerp(v, v * 2, s),
]


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scalar_decides_no_dtype_of_all_steps_at_once(dtype, compile):
    def cell(h, x):
        v, s = x
        h = torch.tanh(h + v)
        return h, [of(value, s) for of in OF_SCALARS for value in (v, h)]

    torch.manual_seed(0)
    init, v, s = torch.zeros(4, dtype=dtype), torch.randn(5, 4).to(dtype), torch.rand(5) + 0.1
    found = scan(cell, init, (v, s.double()), compile=compile)
    torch.testing.assert_close(found, loop(cell, init, (v, s.double())))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_statistics_of_rows_stay_in_loops_of_cpus(device):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, 4, device=device)
    node = graph.call_function(torch.ops.aten.var_mean.correction, (x, [1]))
    assert is_batchable(node)
    for pointwise_pays in (False, True):
        costs = Costs(pointwise_pays, guard_sizes=True, least_weight=0)
        assert costs.may_be_batched(node) == (device != "cpu")
