"""Compose the steps of a rank into one map of the carries, by a scan that needs no carry to start.

The next carries of the body must be affine in its carries, lane by lane::

    h_i' = sum_j a_ij h_j + b_i
    many steps:   A' = a A,   B' = a B + b,   from A = 1 and B = 0;   then   h = A h_0 + B
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torch_scan_hop._torch.fakes import fake_mode_of, fake_tensor
from torch_scan_hop._torch.operators import disable_proxy_modes_tracing
from torch_scan_hop._torch.tracing import trace
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.body.operator_table import operators
from torch_scan_hop.errors import Refusal
from torch_scan_hop.op import ScanOptions, call_scan
from torch_scan_hop.rewrites.affine import NOT_LINEAR, ONE, RULES, Form, Pair, closure
from torch_scan_hop.rewrites.parts import extract
from torch_scan_hop.signature import Inputs, Signature

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Composed:
    """``body`` is a step of the scan whose carries are ``A`` at ``entries``, then ``B``."""

    body: fx.GraphModule
    entries: list[Pair]
    like: list[Tensor]  # each carry

    def over(self, xs: Sequence[Tensor], additional: Sequence[Any], how: ScanOptions) -> Any:
        """Run the steps composed; return ``A`` and ``B`` of all of them, in a list."""
        like = [torch.empty(c.shape, dtype=c.dtype, device=xs[0].device) for c in self.like]
        ones = [(torch.ones_like if i == j else torch.zeros_like)(like[i]) for i, j in self.entries]
        start = [*ones, *map(torch.zeros_like, like)]
        n = len(start)
        return list(call_scan(self.body, Inputs(start, [*xs], [*additional]), how)[:n])

    def applied(self, composed: Sequence[Tensor], carry: Sequence[Tensor]) -> list[Tensor]:
        """Return the carries after steps that are ``composed``, from those before."""
        n = len(self.entries)
        found = list(composed[n:])
        for (i, j), a in zip(self.entries, composed[:n], strict=True):
            found[i] = found[i] + a * carry[j]
        return found


def composed_steps(body: fx.GraphModule, signature: Signature, states: Sequence[int]) -> Composed:
    """Compose the steps of the carries ``states``, which read no other carry."""
    roles, results = signature.inputs_of(body), signature.outputs_of(body)
    carries = [roles.carry[k] for k in states]
    others = [*roles.xs, *roles.additional]
    nexts = [results.carry[k] for k in states]
    part = extract(body, [*carries, *others], nexts, "Step")
    like = [value_of(c) for c in carries]
    for k, value in zip(states, like, strict=True):
        if not (value.is_floating_point() or value.is_complex()):
            raise Refusal(f"carry {k} is of {value.dtype}")
    # a number, which is a constant of the graph, has no record on torch 2.13
    values = [node.meta.get("val") for node in others]
    tensors = [*like, *(v for v in values if isinstance(v, Tensor))]
    mode = fake_mode_of(tensors)
    with disable_proxy_modes_tracing(), torch.no_grad():
        forms: list[Form] = []

        def once(*values: Any) -> None:
            forms[:] = _forms(part, like, values)

        trace(once, values, mode)
        direct = {(i, j) for i, form in enumerate(forms) for j in form.coefficients}
        entries = sorted(closure(direct) | {(i, i) for i in range(len(like))})

        def step(*flat: Any) -> list[Tensor]:
            n = len(entries) + len(like)
            a, b = dict(zip(entries, flat[: len(entries)], strict=True)), flat[len(entries) : n]
            forms = _forms(part, like, flat[n:])
            return [
                *(_entry(forms[i], i, j, a, like[i]) for i, j in entries),
                *(_shift(form, b, like[i]) for i, form in enumerate(forms)),
            ]

        shapes = [*(like[i] for i, _ in entries), *like]
        start = [fake_tensor(mode, c.shape, c.stride(), c.dtype, c.device) for c in shapes]
        return Composed(trace(step, [*start, *values], mode), entries, like)


def _entry(form: Form, i: int, j: int, a: Mapping[Pair, Tensor], like: Tensor) -> Tensor:
    terms = [_times(own, a[k, j]) for k, own in form.coefficients.items() if (k, j) in a]
    return _summed(terms, like)


def _shift(form: Form, b: Sequence[Tensor], like: Tensor) -> Tensor:
    terms = [_times(own, b[k]) for k, own in form.coefficients.items()]
    return _summed([*terms, *([] if form.constant is None else [form.constant])], like)


def _times(own: Any, value: Tensor) -> Tensor:
    return value if own is ONE else own * value


def _summed(terms: Sequence[Any], like: Tensor) -> Tensor:
    total: Any = 0
    for k, term in enumerate(terms):
        total = total + term if k else term
    if not isinstance(total, Tensor):
        return torch.full(like.shape, total, dtype=like.dtype, device=like.device)
    return total.to(like.dtype).expand(like.shape).contiguous()


# --- a step, whose values may be forms ---


class _Tensors:
    """The operators on coefficients: tensors, and numbers."""

    add, mul, neg, truediv = operator.add, operator.mul, operator.neg, operator.truediv
    where = staticmethod(torch.where)

    def __init__(self, device: Any) -> None:
        self.device = device

    def constant(self, value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((), value, dtype=dtype, device=self.device)


def _lerp(inner: Any, a: Any, b: Any, weight: Any) -> Form:
    difference = RULES["sub"](inner, b, a)
    return RULES["add"](inner, a, RULES["mul"](inner, difference, weight))


def _linear_in_first(target: Any) -> Callable[..., Form]:
    """Return the rule of a derivative, which is linear in the result's cotangent."""

    def rule(inner: Any, cotangent: Any, result: Any, *others: Any) -> Form:
        if isinstance(result, Form):
            raise Refusal(NOT_LINEAR)
        return RULES["mul"](inner, cotangent, target(torch.ones_like(result), result, *others))

    return rule


_RULE_OF: dict[Any, Callable[..., Form]] = {
    aten.add.Tensor: RULES["add"],
    aten.sub.Tensor: RULES["sub"],
    aten.rsub.Scalar: lambda inner, a, b: RULES["sub"](inner, b, a),
    aten.mul.Tensor: RULES["mul"],
    aten.mul.Scalar: RULES["mul"],
    aten.div.Tensor: RULES["truediv"],
    aten.neg.default: RULES["neg"],
    aten.where.self: RULES["where"],
    aten.lerp.Scalar: _lerp,
    aten.lerp.Tensor: _lerp,
    aten.addcmul.default: lambda inner, a, b, c: RULES["fma"](inner, b, c, a),
    **{
        target: _linear_in_first(target)
        for target in (
            aten.tanh_backward.default,
            aten.sigmoid_backward.default,
            aten.threshold_backward.default,
        )
    },
    **dict.fromkeys(operators("copy"), lambda inner, a, **_: a),
}


class _Forms(fx.Interpreter):
    """Interpreter that runs a step with a form for each value that depends on carries."""

    def __init__(self, module: fx.GraphModule, device: Any) -> None:
        super().__init__(module)
        self.extra_traceback = False  # errors are reasons here
        self.inner = _Tensors(device)

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        if isinstance(value, Form):
            like = value_of(node)
            if like.dtype != value.dtype:
                raise Refusal(f"a carry goes through {node.target}, which gives {like.dtype}")
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        flat = [*args, *kwargs.values()]
        flat += [v for group in flat if isinstance(group, (list, tuple)) for v in group]
        if not any(isinstance(a, Form) for a in flat):
            return super().call_function(target, args, kwargs)
        rule = _RULE_OF.get(target)
        if rule is None or (kwargs and target not in operators("copy")):
            raise Refusal(f"a carry goes through {target}")
        try:
            return rule(self.inner, *args, **kwargs)
        except Refusal as refusal:
            raise Refusal(f"a carry goes through {target}, {refusal}") from None


def _forms(part: fx.GraphModule, like: Sequence[Tensor], values: Sequence[Any]) -> list[Form]:
    """Return the next carries as forms, from ``values`` of everything that is not a carry."""
    carries = [Form(c.dtype, {k: ONE}) for k, c in enumerate(like)]
    results = _Forms(part, like[0].device).run(*carries, *values, enable_io_processing=False)
    return [
        r if isinstance(r, Form) else Form(c.dtype, constant=r)
        for r, c in zip(results, like, strict=True)
    ]
