"""Write a lowered step's next carries as affine functions of the carries (``rewrites/affine``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_scan_hop._torch.inductor_values import handled_by, handler_at_hand
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.lane_body import PointwiseBody
from torch_scan_hop.inductor.step import StepOps
from torch_scan_hop.rewrites.affine import NOT_LINEAR, ONE, RULES, Form

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
