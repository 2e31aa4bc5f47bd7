"""Steps as affine functions of the carries (``rewrites/affine``), and the code that composes them.

What all rows of a tile up to one do is a function of the carry. A row of a tile is a step. Before
the scan over rows each row has the matrix ``a`` and the vector ``b`` of its own step; after it,
those of all steps from the tile's first to its own:

    (a, b), then (a', b')  =  (a' a, a' b + b')

Entries of ``a`` that are zero or one for all steps are not stored as values of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torch_scan_hop._torch.inductor_triton import storage_type
from torch_scan_hop._torch.inductor_values import handled_by, handler_at_hand
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.lane_body import PointwiseBody
from torch_scan_hop.inductor.step import StepOps
from torch_scan_hop.rewrites.affine import NOT_LINEAR, ONE, RULES, Form, closure

# Carries of other types are rounded, or wrap around, in every step.
DTYPES = {torch.float32, torch.float64, torch.int32, torch.int64}


def forms_of_carries(
    body: PointwiseBody, lane: Sequence[Any], dtypes: Sequence[torch.dtype]
) -> list[Form]:
    """Return the next carries of a lane as forms; refuse a carry that enters in no affine way."""
    for k, dtype in enumerate(dtypes):
        if dtype not in DTYPES:
            raise Refusal(f"carry {k} is of {dtype}")
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
            raise Refusal(f"carry {k} is the {form.extreme} of another carry")
        if not form.extreme and extremes & others:
            other = min(extremes & others)
            raise Refusal(f"carry {k} depends on carry {other}, a {forms[other].extreme}")


def _unwrapped(value: Any) -> Any:
    return getattr(value, "value", value)


class FormOps(StepOps):
    """Operators that take forms besides values. Reading a carry gives a form."""

    def __init__(self, inner: Any, body: PointwiseBody, dtypes: Sequence[torch.dtype]) -> None:
        super().__init__(inner, body.lowering, lambda k, _: Form(dtypes[k], {k: ONE}))

    def _default(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any(isinstance(a, Form) for a in (*args, *kwargs.values())):
            return super()._default(name, args, kwargs)
        try:
            if name in RULES:
                return RULES[name](self._inner, *args, **kwargs)
            raise Refusal(NOT_LINEAR)
        except Refusal as refusal:
            raise Refusal(f"a carry goes through {name}, {refusal}") from None

    def masked(self, mask: Any, body: Callable[[], Any], other: Any) -> Any:
        def plain() -> Any:
            value = body()
            if isinstance(_unwrapped(value), Form):
                raise Refusal("a carry is read behind a mask")
            return value

        return super().masked(mask, plain, other)


# Values of a row: beyond, what a thread has of a tile does not fit its registers.
MOST_VALUES = 12

# A composed carry is taken for the loop's if it is what a step makes of the one before it, but for
# so many roundings of that step's terms. A scan over 1024 rows rounds some ten times; where sums
# cancel, the terms of the step are smaller than what was rounded.
ROUNDINGS = 1024


class Composition:
    """Composes steps whose next carries are ``forms``.

    Attributes:
        entries: of ``a`` that are values of the kernel.
        shifted: the carries that have a ``b``.
        checked: the carries whose composition may not be what the loop computes: products of
            floating point coefficients overflow, and cancel.
    """

    def __init__(self, forms: Sequence[Form]) -> None:
        self.forms = forms
        self.extremes = {k for k, form in enumerate(forms) if form.extreme}
        affine = [k for k in range(len(forms)) if k not in self.extremes]
        direct = {(i, j) for i in affine for j in forms[i].coefficients}
        # a row that is no step changes nothing, so that each carry has its own entry
        self._reached = closure(direct) | {(i, i) for i in affine}
        self._ones = {(i, i) for i in affine if self._is_one(i)}
        self.entries = sorted(self._reached - self._ones)
        self.shifted = [k for k in range(len(forms)) if self._has_constant(k)]
        self.checked = [k for k in affine if forms[k].dtype.is_floating_point]
        if len(self.values) > MOST_VALUES:
            raise Refusal(f"its steps compose in {len(self.values)} values, over {MOST_VALUES}")

    def _is_one(self, i: int) -> bool:
        """Return True if carry ``i`` is only added to, by carries that do not depend on it."""
        others = {j for k, j in self._reached if k == i and j != i}
        depends = any((j, i) in self._reached for j in others)
        return self.forms[i].coefficients.get(i) is ONE and not depends

    def _has_constant(self, i: int) -> bool:
        reached = {j for k, j in self._reached if k == i} or {i}
        return any(self.forms[j].constant is not None for j in reached)

    @property
    def values(self) -> list[str]:
        """The names of the values that are scanned."""
        return [*(f"a{i}_{j}" for i, j in self.entries), *(f"b{i}" for i in self.shifted)]

    # --- lines ---

    def function(self) -> list[str]:
        """Return the function ``compose`` of a row's values and those of a later row."""
        names = [f"{side}_{name}" for side in ("first", "then") for name in self.values]
        results = [*(self._entry(*at) for at in self.entries), *map(self._shift, self.shifted)]
        return [
            "@triton.jit",
            f"def compose({', '.join(names)}):",
            f"    return {', '.join(results)}",
        ]

    def _a(self, i: int, j: int, side: str = "") -> str:
        return "" if (i, j) in self._ones else f"{side}a{i}_{j}"

    def _entry(self, i: int, j: int) -> str:
        through = [k for n, k in self._reached if n == i and (k, j) in self._reached]
        pairs = ((self._a(i, k, "then_"), self._a(k, j, "first_")) for k in sorted(through))
        return added(multiplied(*pair) for pair in pairs)

    def _shift(self, i: int) -> str:
        if i in self.extremes:
            return f"triton_helpers.{self.forms[i].extreme}(first_b{i}, then_b{i})"
        through = sorted(k for n, k in self._reached if n == i and k in self.shifted)
        terms = [multiplied(self._a(i, k, "then_"), f"first_b{k}") for k in through]
        return added([*terms, f"then_b{i}"])

    def of_rows(self, mask: str, shape: str) -> list[str]:
        """Emit each row's own step; rows outside ``mask`` are no steps, and change nothing."""
        lines = []
        for i, j in self.entries:
            own = self.forms[i].coefficients.get(j, 0)
            lines.append(f"a{i}_{j} = {self._masked(i, own, str(int(i == j)), mask, shape)}")
        for i in self.shifted:
            own = self.forms[i].constant
            own = self._neutral(i) if own is None else own
            lines.append(f"b{i} = {self._masked(i, own, self._neutral(i), mask, shape)}")
        return lines

    def _masked(self, i: int, own: Any, none: str, mask: str, shape: str) -> str:
        kind = storage_type(self.forms[i].dtype)
        return f"tl.broadcast_to(tl.where({mask}, {own}, {none}).to({kind}), [{shape}])"

    def _neutral(self, i: int) -> str:
        """Return the value that changes no carry when it is added to it, or compared with it."""
        dtype = self.forms[i].dtype
        if i not in self.extremes:
            return "0"
        is_lowest = self.forms[i].extreme == "maximum"
        if dtype.is_floating_point:
            return f'float("{"-" if is_lowest else ""}inf")'
        limits = torch.iinfo(dtype)
        return f"tl.full([1, 1], {limits.min if is_lowest else limits.max}, {storage_type(dtype)})"

    def scanned(self) -> list[str]:
        """Emit the scan over rows, and the carry after each row: ``after``."""
        names = ", ".join(self.values)
        lines = [f"({names},) = tl.associative_scan(({names},), 0, compose)"] if names else []
        return lines + [f"after{k} = {self._applied(k)}" for k in range(len(self.forms))]

    def _applied(self, i: int) -> str:
        if i in self.extremes:
            return f"triton_helpers.{self.forms[i].extreme}(carry{i}, b{i})"
        reached = sorted(j for k, j in self._reached if k == i)
        terms = [multiplied(self._a(i, j), f"carry{j}") for j in reached]
        return added([*terms, *([f"b{i}"] if i in self.shifted else [])])

    def agreement(self) -> list[str]:
        """Emit ``agrees``: whether ``after`` is near ``next``, which a step makes of ``before``. If
        so in all rows up to one, that row's carry is the loop's, infinities and nans included."""
        lines = []
        for k in self.checked:
            limits = torch.finfo(self.forms[k].dtype)
            near = f"size * {ROUNDINGS * limits.eps} + {limits.tiny}"
            lines += [
                f"size = {self._size_of_terms(k)}",
                f"near = (tl.abs(after{k} - next{k}) <= {near}) & (size < float('inf'))",
                f"both_nan = (after{k} != after{k}) & (next{k} != next{k})",
                f"agrees &= near | both_nan | (after{k} == next{k})",
            ]
        return lines

    def _size_of_terms(self, i: int) -> str:
        """Return the sum of the absolute terms of what a step computes."""
        form = self.forms[i]
        terms = [
            multiplied("" if own is ONE else f"tl.abs({own})", f"tl.abs(before{j})")
            for j, own in sorted(form.coefficients.items())
        ]
        return added([*terms, *([] if form.constant is None else [f"tl.abs({form.constant})"])])


def multiplied(*factors: str) -> str:
    """Return a product of factors; a factor of one is left out."""
    return " * ".join(filter(None, factors)) or "1"


def added(terms: Iterable[str]) -> str:
    return " + ".join(terms) or "0"
