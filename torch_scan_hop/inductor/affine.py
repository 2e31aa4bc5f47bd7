"""Next carries as functions of the carries: affine, or the greatest or least of one and more.

::

    affine:   h_i' = sum_j a_ij h_j + b_i        a and b read no carry
    extreme:  h_i' = max(h_i, b_i)               or min

Such steps compose: what many in a row do to a carry is known without the carry, and is of the same
form. A lowered step is run once more, whose operators take forms beside values: it is asked for
what it computes, not for what its graph looks like, and the coefficients are values of any kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_scan_hop._torch.inductor_values import NotPointwise, handled_by, handler_at_hand
from torch_scan_hop.inductor.lane_body import PointwiseBody
from torch_scan_hop.inductor.step import StepOps

# Carries of other types are rounded, or wrap around, in every step.
DTYPES = {torch.float32, torch.float64, torch.int32, torch.int64}

ONE = 1  # a coefficient that is that number, and no value of the kernel


class NotAffine(NotPointwise):
    """A carry enters a step otherwise; says which operator it goes through."""


@dataclass(frozen=True)
class Form:
    """``sum(coefficients[j] * carry[j]) + constant``; the extreme of ``carry[j]`` and it.

    Attributes:
        dtype: of the value.
        coefficients: values that no carry is in, by carry; or ``ONE``.
        constant: a value that no carry is in; None for no such term.
        extreme: "maximum" or "minimum", of one carry whose coefficient is ``ONE``.
    """

    dtype: torch.dtype
    coefficients: dict[int, Any] = field(default_factory=dict)
    constant: Any = None
    extreme: str = ""


def forms_of_carries(
    body: PointwiseBody, lane: Sequence[Any], dtypes: Sequence[torch.dtype]
) -> list[Form]:
    """The next carries of a lane, with the operators at hand; NotAffine if one has no form."""
    for k, dtype in enumerate(dtypes):
        if dtype not in DTYPES:
            raise NotAffine(f"carry {k} is of {dtype}")
    handler = FormOps(handler_at_hand(), body, dtypes)
    with handled_by(handler):
        values = body.values(lane, dtypes)
    forms = [
        value if isinstance(value, Form) else Form(dtype, constant=value)
        for value, dtype in zip(map(_unwrapped, values), dtypes, strict=True)
    ]
    _check_extremes(forms)
    return forms


def _check_extremes(forms: Sequence[Form]) -> None:
    extremes = {k for k, form in enumerate(forms) if form.extreme}
    for k, form in enumerate(forms):
        others = form.coefficients.keys() - {k}
        if form.extreme and others:
            raise NotAffine(f"carry {k} is the {form.extreme} of another carry")
        if not form.extreme and extremes & others:
            other = min(extremes & others)
            raise NotAffine(f"carry {k} depends on carry {other}, a {forms[other].extreme}")


def _unwrapped(value: Any) -> Any:
    return getattr(value, "value", value)


class FormOps(StepOps):
    """Operators that take forms beside values; reads of a carry are a form."""

    def __init__(self, inner: Any, body: PointwiseBody, dtypes: Sequence[torch.dtype]) -> None:
        super().__init__(inner, body.lowering, lambda k, _: Form(dtypes[k], {k: ONE}))

    def _default(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any(isinstance(a, Form) for a in (*args, *kwargs.values())):
            return super()._default(name, args, kwargs)
        rule = _RULES.get(name)
        form = None if rule is None else rule(self._inner, *args, **kwargs)
        if form is None:
            raise NotAffine(f"a carry goes through {name}, in which it is not linear")
        return form

    def masked(self, mask: Any, body: Callable[[], Any], other: Any) -> Any:
        def plain() -> Any:
            value = body()
            if isinstance(_unwrapped(value), Form):
                raise NotAffine("a carry is read behind a mask")
            return value

        return super().masked(mask, plain, other)


# --- rules: of operators at hand and arguments, one of them a form; None for no form ---


def _affine(value: Any, like: Form) -> Form | None:
    if not isinstance(value, Form):
        return Form(like.dtype, constant=value)
    return None if value.extreme else value


def _both(a: Any, b: Any) -> tuple[Form, Form] | None:
    like = a if isinstance(a, Form) else b
    first, second = _affine(a, like), _affine(b, like)
    return None if first is None or second is None else (first, second)


def _value(inner: Any, coefficient: Any, dtype: torch.dtype) -> Any:
    """As an operand: a number for ``ONE``, and for None, a term that is not there."""
    if coefficient is not None and coefficient is not ONE:
        return coefficient
    number = 0 if coefficient is None else 1
    return inner.constant(float(number) if dtype.is_floating_point else number, dtype)


def _map(inner: Any, form: Form, fn: Callable[[Any], Any]) -> Form:
    """``fn``, which is linear, of each term."""
    found = {j: fn(_value(inner, value, form.dtype)) for j, value in form.coefficients.items()}
    return Form(form.dtype, found, None if form.constant is None else fn(form.constant))


def _sum(inner: Any, a: Any, b: Any) -> Form | None:
    both = _both(a, b)
    if both is None:
        return None
    first, second = both
    found = dict(first.coefficients)
    for j, value in second.coefficients.items():
        terms = [found[j], value] if j in found else []
        found[j] = inner.add(*(_value(inner, t, first.dtype) for t in terms)) if terms else value
    constants = [form.constant for form in both if form.constant is not None]
    constant = inner.add(*constants) if len(constants) == 2 else (constants or [None])[0]
    return Form(first.dtype, found, constant)


def _neg(inner: Any, a: Form) -> Form | None:
    return None if a.extreme else _map(inner, a, inner.neg)


def _sub(inner: Any, a: Any, b: Any) -> Form | None:
    negative = _neg(inner, b) if isinstance(b, Form) else inner.neg(b)
    return None if negative is None else _sum(inner, a, negative)


def _mul(inner: Any, a: Any, b: Any) -> Form | None:
    form, factor = (a, b) if isinstance(a, Form) else (b, a)
    if isinstance(factor, Form) or form.extreme:
        return None
    # the factor itself is what a carry is multiplied with
    coefficients = {
        j: factor if value is ONE else inner.mul(value, factor)
        for j, value in form.coefficients.items()
    }
    constant = None if form.constant is None else inner.mul(form.constant, factor)
    return Form(form.dtype, coefficients, constant)


def _truediv(inner: Any, a: Any, b: Any) -> Form | None:
    if isinstance(b, Form) or a.extreme or not a.dtype.is_floating_point:
        return None
    return _map(inner, a, lambda value: inner.truediv(value, b))


def _fma(inner: Any, a: Any, b: Any, c: Any) -> Form | None:
    is_form = isinstance(a, Form) or isinstance(b, Form)
    product = _mul(inner, a, b) if is_form else inner.mul(a, b)
    return None if product is None else _sum(inner, product, c)


def _where(inner: Any, condition: Any, a: Any, b: Any) -> Form | None:
    both = None if isinstance(condition, Form) else _both(a, b)
    if both is None:
        return None
    first, second = both

    def chosen(*values: Any) -> Any:
        if values[0] is values[1]:
            return values[0]
        return inner.where(condition, *(_value(inner, v, first.dtype) for v in values))

    places = {**first.coefficients, **second.coefficients}
    found = {j: chosen(*(form.coefficients.get(j) for form in both)) for j in places}
    return Form(first.dtype, found, chosen(first.constant, second.constant))


def _extreme(name: str) -> Callable[..., Form | None]:
    def rule(inner: Any, a: Any, b: Any) -> Form | None:
        form, value = (a, b) if isinstance(a, Form) else (b, a)
        [coefficient, *others] = form.coefficients.values()
        is_carry = coefficient is ONE and not others and form.constant is None
        if isinstance(value, Form) or not (is_carry or form.extreme == name):
            return None
        if form.constant is not None:
            value = getattr(inner, name)(form.constant, value)
        return Form(form.dtype, form.coefficients, value, name)

    return rule


def _to_dtype(_: Any, a: Any, dtype: torch.dtype, *__: Any, **___: Any) -> Form | None:
    return a if dtype == a.dtype else None


_RULES: dict[str, Callable[..., Form | None]] = {
    "add": _sum,
    "sub": _sub,
    "neg": _neg,
    "mul": _mul,
    "truediv": _truediv,
    "fma": _fma,
    "where": _where,
    "maximum": _extreme("maximum"),
    "minimum": _extreme("minimum"),
    "to_dtype": _to_dtype,
    "identity": lambda _, a: a,
}
