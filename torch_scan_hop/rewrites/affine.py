"""Values of a step as functions of its carries: affine, or a maximum or minimum.

::

    affine:   h_i' = sum_j a_ij h_j + b_i        a and b read no carry
    extreme:  h_i' = max(h_i, b_i)               or min

Such steps compose: the effect of many steps in a row on a carry has the same form, and is known
without the carry. To find the forms, a step is run once more with operators that take forms besides
values; its graph is not matched against patterns. Whoever runs it says what the coefficients are,
and the operators on them: values of a kernel (``inductor/gpu/composition``), or tensors
(``sharding/composed``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_scan_hop.errors import Refusal

ONE = 1  # a coefficient that is that number, and no value


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


Pair = tuple[int, int]


def closure(pairs: set[Pair]) -> set[Pair]:
    """
    >>> sorted(closure({(0, 1), (1, 2)}))
    [(0, 1), (0, 2), (1, 2)]
    """
    while True:
        grown = pairs | {(i, k) for i, j in pairs for m, k in pairs if j == m}
        if grown == pairs:
            return pairs
        pairs = grown


# --- rules: of operators at hand and arguments, one of them a form ---

NOT_LINEAR = "in which it is not linear"


def _affine(value: Any, like: Form) -> Form:
    if not isinstance(value, Form):
        return Form(like.dtype, constant=value)
    if value.extreme:
        raise Refusal(NOT_LINEAR)
    return value


def _both(a: Any, b: Any) -> tuple[Form, Form]:
    like = a if isinstance(a, Form) else b
    return _affine(a, like), _affine(b, like)


def _value(inner: Any, coefficient: Any, dtype: torch.dtype) -> Any:
    """Return a coefficient as an operand: 1 for ``ONE``, and 0 for None, which is no term."""
    if coefficient is not None and coefficient is not ONE:
        return coefficient
    number = 0 if coefficient is None else 1
    return inner.constant(float(number) if dtype.is_floating_point else number, dtype)


def _map(inner: Any, form: Form, fn: Callable[[Any], Any]) -> Form:
    """Apply ``fn``, which is linear, to each term."""
    found = {j: fn(_value(inner, value, form.dtype)) for j, value in form.coefficients.items()}
    return Form(form.dtype, found, None if form.constant is None else fn(form.constant))


def _sum(inner: Any, a: Any, b: Any) -> Form:
    first, second = _both(a, b)
    found = dict(first.coefficients)
    for j, value in second.coefficients.items():
        terms = [found[j], value] if j in found else []
        found[j] = inner.add(*(_value(inner, t, first.dtype) for t in terms)) if terms else value
    constants = [form.constant for form in (first, second) if form.constant is not None]
    constant = inner.add(*constants) if len(constants) == 2 else (constants or [None])[0]
    return Form(first.dtype, found, constant)


def _neg(inner: Any, a: Form) -> Form:
    return _map(inner, _affine(a, a), inner.neg)


def _sub(inner: Any, a: Any, b: Any) -> Form:
    return _sum(inner, a, _neg(inner, b) if isinstance(b, Form) else inner.neg(b))


def _mul(inner: Any, a: Any, b: Any) -> Form:
    form, factor = (a, b) if isinstance(a, Form) else (b, a)
    if isinstance(factor, Form) or form.extreme:
        raise Refusal(NOT_LINEAR)
    # the factor itself is what a carry is multiplied with
    coefficients = {
        j: factor if value is ONE else inner.mul(value, factor)
        for j, value in form.coefficients.items()
    }
    constant = None if form.constant is None else inner.mul(form.constant, factor)
    return Form(form.dtype, coefficients, constant)


def _truediv(inner: Any, a: Any, b: Any) -> Form:
    if isinstance(b, Form) or a.extreme or not (a.dtype.is_floating_point or a.dtype.is_complex):
        raise Refusal(NOT_LINEAR)
    return _map(inner, a, lambda value: inner.truediv(value, b))


def _fma(inner: Any, a: Any, b: Any, c: Any) -> Form:
    is_form = isinstance(a, Form) or isinstance(b, Form)
    return _sum(inner, _mul(inner, a, b) if is_form else inner.mul(a, b), c)


def _where(inner: Any, condition: Any, a: Any, b: Any) -> Form:
    if isinstance(condition, Form):
        raise Refusal(NOT_LINEAR)
    first, second = _both(a, b)

    def chosen(*values: Any) -> Any:
        if values[0] is values[1]:
            return values[0]
        return inner.where(condition, *(_value(inner, v, first.dtype) for v in values))

    places = {**first.coefficients, **second.coefficients}
    found = {j: chosen(*(form.coefficients.get(j) for form in (first, second))) for j in places}
    return Form(first.dtype, found, chosen(first.constant, second.constant))


def _extreme(name: str) -> Callable[..., Form]:
    def rule(inner: Any, a: Any, b: Any) -> Form:
        form, value = (a, b) if isinstance(a, Form) else (b, a)
        [coefficient, *others] = form.coefficients.values()
        is_carry = coefficient is ONE and not others and form.constant is None
        if isinstance(value, Form) or not (is_carry or form.extreme == name):
            raise Refusal(NOT_LINEAR)
        if form.constant is not None:
            value = getattr(inner, name)(form.constant, value)
        return Form(form.dtype, form.coefficients, value, name)

    return rule


def _to_dtype(_: Any, a: Any, dtype: torch.dtype, *__: Any, **___: Any) -> Form:
    if dtype != a.dtype:
        raise Refusal(NOT_LINEAR)
    return a  # type: ignore[no-any-return]


RULES: dict[str, Callable[..., Form]] = {
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
