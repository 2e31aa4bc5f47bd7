"""Forward mode: one scan over primals and tangents together.

::

    body':  (carry, dcarry, x, dx, additional, dadditional) -> (carry', dcarry', y, dy)

Only leaves that have a tangent get one here. Which carries have one is found by a fixpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from torch_scan_hop.body.cache import remember_for
from torch_scan_hop.body.cleanup import clean_up
from torch_scan_hop.body.step_examples import step_examples
from torch_scan_hop.body.stop_gradient import with_stops
from torch_scan_hop.op import Body, ScanOptions, call_scan, scan_op
from torch_scan_hop.signature import Inputs

Dual = tuple[Any, Any]  # (primal, tangent or None)


#: for each leaf, if it has a tangent
Flags = Inputs[bool]


def _paired(values: Iterator[Any], flags: Sequence[bool]) -> list[Dual]:
    """Take the primals of one role, and then the tangents that there are."""
    primals = [next(values) for _ in flags]
    tangents = [next(values) if flag else None for flag in flags]
    return list(zip(primals, tangents, strict=True))


def _in_a_row(pairs: Sequence[Dual], flags: Sequence[bool]) -> list[Any]:
    """Return what :func:`_paired` takes; a tangent that is missing is zero."""
    tangents = [
        torch.zeros_like(p) if t is None else t
        for (p, t), flag in zip(pairs, flags, strict=True)
        if flag
    ]
    return [*(p for p, _ in pairs), *tangents]


def _with_tangents(inputs: Inputs[Dual], flags: Flags) -> Inputs[Any]:
    """Return the inputs of a scan of primals and tangents: a tangent is an input of its own."""
    return Inputs(
        _in_a_row(inputs.carry, flags.carry),
        _in_a_row(inputs.xs, flags.xs),
        _in_a_row(inputs.additional, flags.additional),
    )


def _on_pairs(body: Body, flags: Flags) -> Callable[..., list[Dual]]:
    """Return ``body`` as a function of what :func:`_with_tangents` returns, to pairs of results."""
    marked = with_stops(body)

    def pairs(*flat: Any) -> list[Dual]:
        values, roles = iter(flat), (flags.carry, flags.xs, flags.additional)
        given = [pair for role in roles for pair in _paired(values, role)]
        with dual_level():
            return [unpack_dual(o) for o in marked(*_as_duals(given))]

    return pairs


TangentTrace = tuple[fx.GraphModule, Flags, list[bool]]


def _tangent_body(body: Body, inputs: Inputs[Any], start: Flags) -> TangentTrace:
    """Return the traced body, which of its inputs have tangents, and which of its ys."""
    refuse_custom_function(body)

    def trace() -> TangentTrace:
        return _trace_tangent_body(with_differentiable_operators(body), inputs, start)

    return remember_for(body, "jvp", inputs, tuple(start.flat()), trace)


def _trace_tangent_body(body: Body, inputs: Inputs[Any], start: Flags) -> TangentTrace:
    n_carry = len(inputs.carry)
    mode, primals = step_examples(inputs)

    def at(carry: Sequence[bool]) -> tuple[Flags, Callable[..., list[Dual]], Inputs[Any]]:
        """Return the body for these carries with tangents, behind its flags, and examples."""
        flags = Inputs(list(carry), start.xs, start.additional)
        _, tangents = step_examples(inputs)
        duals = zip(primals.flat(), tangents.flat(), strict=True)
        examples = _with_tangents(inputs.signature.split_inputs([*duals]), flags)
        return flags, _on_pairs(body, flags), examples

    def output_flags(carry: Sequence[bool]) -> list[bool]:
        _, pairs, examples = at(carry)
        return [t is not None for _, t in run_fake(pairs, examples.flat(), mode)]

    carry, after = carry_fixpoint(start.carry, output_flags)
    y_flags = list(after[n_carry:])
    flags, on_pairs, examples = at(carry)

    def run(*flat: Any) -> tuple[Any, ...]:
        pairs = on_pairs(*flat)
        return (*_in_a_row(pairs[:n_carry], carry), *_in_a_row(pairs[n_carry:], y_flags))

    module = trace(run, examples.flat(), mode)
    clean_up(module)
    legality.checked("jvp", module, examples.signature)
    return module, flags, y_flags


def tangent_scan(body: Body, inputs: Inputs[Dual], options: ScanOptions) -> list[Dual]:
    """Return the scan's results and their tangents, None where there is none."""
    start = inputs.map(lambda pair: pair[1] is not None)
    module, flags, y_flags = _tangent_body(body, inputs.map(lambda pair: pair[0]), start)
    results = iter(call_scan(module, _with_tangents(inputs, flags), options))
    return [*_paired(results, flags.carry), *_paired(results, y_flags)]


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
