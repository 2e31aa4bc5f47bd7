"""Forward mode: one scan over primals and tangents together.

::

    body':  (carry, dcarry, x, dx, additional, dadditional) -> (carry', dcarry', y, dy)

Only leaves that have a tangent get one here. Which carries have one is found by a fixpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_scan_hop import legality
from torch_scan_hop._torch.operators import TransformType
from torch_scan_hop._torch.tracing import run_fake, trace
from torch_scan_hop._torch.transforms import (
    dual_level,
    make_dual,
    unpack_dual,
    unwrap_for_level,
    wrap_for_level,
)
from torch_scan_hop.autodiff.custom import refuse_custom_function
from torch_scan_hop.autodiff.differentiability import carry_fixpoint
from torch_scan_hop.autodiff.differentiable import with_differentiable_operators
from torch_scan_hop.body.cache import autocast_state, inputs_metadata, remember
from torch_scan_hop.body.cleanup import clean_up
from torch_scan_hop.body.step_examples import step_examples
from torch_scan_hop.body.stop_gradient import with_stops
from torch_scan_hop.op import Body, ScanOptions, call_scan, scan_op
from torch_scan_hop.signature import Inputs, Signature

Dual = tuple[Any, Any]  # (primal, tangent or None)


class TangentBody:
    """``body`` on (primals, tangents of the flagged inputs) -> the same for its outputs."""

    def __init__(self, body: Body, flags: Sequence[bool], n_carry: int) -> None:
        self.body = with_stops(body)
        self.flags = list(flags)
        self.n_carry = n_carry

    def pairs(self, primals: Sequence[Any], tangents: Sequence[Any]) -> list[Dual]:
        given = iter(tangents)
        with dual_level():
            duals = [
                make_dual(p, next(given)) if flag else p
                for p, flag in zip(primals, self.flags, strict=True)
            ]
            out = self.body(*duals)
            return [unpack_dual(o) for o in out]

    def tangent_flags(self, *flat: Any) -> list[bool]:
        n = len(self.flags)
        return [tangent is not None for _, tangent in self.pairs(flat[:n], flat[n:])]


@dataclass(frozen=True)
class _Layout:
    """Roles interleaved as scan wants them: (carry, dcarry, x, dx, additional, dadditional)."""

    carry: tuple[bool, ...]
    xs: tuple[bool, ...]
    additional: tuple[bool, ...]

    def signature(self) -> Signature:
        """The signature of a body with these inputs, and with the tangents of some."""
        sizes = [len(flags) + sum(flags) for flags in (self.carry, self.xs, self.additional)]
        return Signature(*sizes)

    def flags(self) -> tuple[bool, ...]:
        return self.carry + self.xs + self.additional

    def separate(self, flat: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        values = iter(flat)
        primals, tangents = [], []
        for flags in (self.carry, self.xs, self.additional):
            primals += [next(values) for _ in flags]
            tangents += [next(values) for flag in flags if flag]
        return primals, tangents

    def interleave(self, primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        """Put primals and tangents in one list, which :meth:`separate` takes apart."""
        values, given = iter(primals), iter(tangents)
        flat: list[Any] = []
        for flags in (self.carry, self.xs, self.additional):
            flat += [next(values) for _ in flags]
            flat += [next(given) for flag in flags if flag]
        return flat

    def joined(self, inputs: Inputs[Dual]) -> Inputs[Any]:
        return Inputs(
            self.join(inputs.carry, self.carry),
            self.join(inputs.xs, self.xs),
            self.join(inputs.additional, self.additional),
        )

    @staticmethod
    def join(pairs: Sequence[Dual], flags: Sequence[bool]) -> list[Any]:
        primals = [p for p, _ in pairs]
        tangents = [
            (torch.zeros_like(p) if t is None else t)
            for (p, t), flag in zip(pairs, flags, strict=True)
            if flag
        ]
        return [*primals, *tangents]


TangentTrace = tuple[fx.GraphModule, _Layout, list[bool]]


def _tangent_body(body: Body, inputs: Inputs[Any], start: _Layout) -> TangentTrace:
    """The traced body, which of its inputs have tangents, and which of its ys."""
    refuse_custom_function(body)
    key = (
        "jvp",
        inputs_metadata(inputs),
        start.flags(),
        len(inputs.carry),
        autocast_state(),
    )

    def trace() -> TangentTrace:
        return _trace_tangent_body(with_differentiable_operators(body), inputs, start)

    return remember(body, key, trace)


def _trace_tangent_body(body: Body, inputs: Inputs[Any], start: _Layout) -> TangentTrace:
    n_carry = len(inputs.carry)
    mode, examples = step_examples(inputs)

    def at(carry: Sequence[bool]) -> tuple[TangentBody, list[Any]]:
        """Trace the body for these carries with tangents; also return examples of all tangents."""
        flags = [*carry, *start.xs, *start.additional]
        _, like = step_examples(inputs)
        tangents = [t for t, flag in zip(like.flat(), flags, strict=True) if flag]
        return TangentBody(body, flags, n_carry), tangents

    def output_flags(carry: Sequence[bool]) -> list[bool]:
        tangent_body, tangents = at(carry)
        return run_fake(tangent_body.tangent_flags, [*examples.flat(), *tangents], mode)

    carry = carry_fixpoint(start.carry, lambda flags: output_flags(flags)[:n_carry])
    layout = _Layout(carry, start.xs, start.additional)
    y_flags = output_flags(carry)[n_carry:]
    tangent_body, tangents = at(carry)

    def interleaved(*flat: Any) -> tuple[Any, ...]:
        pairs = tangent_body.pairs(*layout.separate(flat))
        return (
            *_Layout.join(pairs[:n_carry], carry),
            *_Layout.join(pairs[n_carry:], y_flags),
        )

    module = trace(interleaved, layout.interleave(examples.flat(), tangents), mode)
    clean_up(module)
    legality.checked("jvp", module, layout.signature())
    return module, layout, y_flags


def tangent_scan(body: Body, inputs: Inputs[Dual], options: ScanOptions) -> list[Dual]:
    """Return the scan's results and their tangents, None where there is none."""
    has_tangent = inputs.map(lambda pair: pair[1] is not None)
    start = _Layout(*map(tuple, (has_tangent.carry, has_tangent.xs, has_tangent.additional)))
    module, layout, y_flags = _tangent_body(body, inputs.map(lambda pair: pair[0]), start)
    results = iter(call_scan(module, layout.joined(inputs), options))
    pairs: list[Dual] = []
    for flags in (layout.carry, tuple(y_flags)):
        values = [next(results) for _ in flags]
        tangents = [next(results) if flag else None for flag in flags]
        pairs += list(zip(values, tangents, strict=True))
    return pairs


def _as_duals(pairs: Sequence[Dual]) -> tuple[Any, ...]:
    return tuple(p if t is None else make_dual(p, t) for p, t in pairs)


def scan_of_duals(body: Body, inputs: Inputs[Any], options: ScanOptions) -> tuple[Any, ...]:
    """Run a scan over dual tensors of ``torch.autograd.forward_ad``."""
    return _as_duals(tangent_scan(body, inputs.map(unpack_dual), options))


@scan_op.kernel(TransformType.Jvp)
def jvp(interpreter: Any, body: Body, inputs: Inputs[Any], options: ScanOptions) -> Any:
    level = interpreter.level()

    def below(value: Any) -> Dual:
        return tuple(unwrap_for_level(v, level) for v in unpack_dual(value))  # type: ignore[return-value]

    pairs_below = inputs.map(below)
    with interpreter.lower():
        pairs = tangent_scan(body, pairs_below, options)
    return _as_duals([tuple(wrap_for_level(v, level) for v in pair) for pair in pairs])  # type: ignore[misc]
