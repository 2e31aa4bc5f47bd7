"""vmap: a scan of the vmapped body.

Before: carry_k, x_k, additional_k, each batched at some dimension or not.
After:  batched carries [B, ...], batched xs [T, B, ...], batched additional inputs [B, ...];
a carry is batched if its init is, or if a step makes it so.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from torch_scan_hop import legality
from torch_scan_hop._torch.fakes import fake_mode_of, fake_tensor
from torch_scan_hop._torch.functorch_levels import ask_tensors_for_sizes
from torch_scan_hop._torch.operators import TransformType
from torch_scan_hop._torch.sizes import is_exporting
from torch_scan_hop._torch.tracing import run_fake, trace
from torch_scan_hop._torch.transforms import restore_vmap, unwrap_batched, wrap_batched
from torch_scan_hop.autodiff.custom import refuse_custom_function
from torch_scan_hop.autodiff.derivative import as_backward, is_backward
from torch_scan_hop.autodiff.differentiability import carry_fixpoint
from torch_scan_hop.body.cache import remember_for
from torch_scan_hop.body.cleanup import clean_up
from torch_scan_hop.body.step_examples import step_examples
from torch_scan_hop.body.stop_gradient import with_stops
from torch_scan_hop.op import Body, ScanOptions, call_scan, scan_op
from torch_scan_hop.signature import Inputs


def _move(value: Any, source: int | None, target: int) -> Any:
    return value if source is None else torch.movedim(value, source, target)


def _over_batch(
    body: Body, flags: Sequence[bool], batch_size: int, randomness: str
) -> Callable[..., tuple[Sequence[Any], Sequence[int | None]]]:
    """Return ``body`` over a batch in dimension 0 of the inputs with flags, to results and dims."""
    marked, in_dims = with_stops(body), tuple(0 if flag else None for flag in flags)
    run = lambda *args: tuple(marked(*args))  # noqa: E731
    return restore_vmap(run, in_dims, batch_size, randomness)  # type: ignore[no-any-return]


def _expanded(carry: Any, batch_size: int) -> Any:
    """Repeat a carry that has no batch, where that of another step has one."""
    return carry.unsqueeze(0).expand(batch_size, *carry.shape)


def _batch_in_front(
    vmapped: Callable[..., Any], flags: Sequence[bool], batch_size: int
) -> Callable[..., tuple[Any, ...]]:
    """Return ``vmapped`` with all batches in dimension 0, of carries with flags in any case."""

    def run(*flat: Any) -> tuple[Any, ...]:
        outs, dims = vmapped(*flat)
        always = [*flags, *[False] * (len(outs) - len(flags))]
        return tuple(
            _expanded(out, batch_size) if flag and dim is None else _move(out, dim, 0)
            for out, dim, flag in zip(outs, dims, always, strict=True)
        )

    return run


@scan_op.kernel(TransformType.Vmap)
def vmap(interpreter: Any, body: Body, inputs: Inputs[Any], options: ScanOptions) -> Any:
    level, batch_size = interpreter.level(), interpreter.batch_size()
    groups, in_dims = unwrap_batched((inputs.carry, inputs.xs, inputs.additional), level)
    dims = _dims_by_role(groups, in_dims)
    with interpreter.lower():
        moved = Inputs(
            [_move(v, d, 0) for v, d in zip(groups[0], dims.carry, strict=True)],
            [_move(v, d, 1) for v, d in zip(groups[1], dims.xs, strict=True)],
            [_move(v, d, 0) for v, d in zip(groups[2], dims.additional, strict=True)],
        )
        batched = dims.map(lambda d: d is not None)
        vmapped, carry_flags, y_flags = _vmapped_body(
            body, moved, batched, batch_size, interpreter.randomness()
        )
        init = [
            _expanded(v, batch_size) if flag and not given else v
            for v, flag, given in zip(moved.carry, carry_flags, batched.carry, strict=True)
        ]
        results = call_scan(vmapped, dataclasses.replace(moved, carry=init), options)
        y_dim = 1
        if is_exporting():
            # torch 2.15 would do this after the scan, and record it of a tensor that the program
            # does not have: it knows the batched one alone.
            pairs = zip(results[len(init) :], y_flags, strict=True)
            ys = [stack.movedim(1, 0) if flag else stack for stack, flag in pairs]
            results, y_dim = (*results[: len(init)], *ys), 0
    out_dims = (
        *(0 if flag else None for flag in carry_flags),
        *(y_dim if flag else None for flag in y_flags),
    )
    assert len(results) == len(out_dims)
    return wrap_batched(tuple(results), out_dims, level)


def _dims_by_role(groups: Any, in_dims: Any) -> Inputs[int | None]:
    if in_dims is None:
        nowhere: list[list[int | None]] = [[None] * len(group) for group in groups]
        return Inputs(*nowhere)
    flat = list(in_dims) if isinstance(in_dims, (list, tuple)) else [in_dims]
    return Inputs(*map(list, flat))


BatchedTrace = tuple[fx.GraphModule, tuple[bool, ...], list[bool]]


def _vmapped_body(
    body: Body, inputs: Inputs[Any], batched: Inputs[bool], batch_size: int, randomness: str
) -> BatchedTrace:
    """Return the traced body, and which carries and ys it batches."""
    refuse_custom_function(body)
    make = functools.partial(_trace_vmapped_body, body, inputs, batched, batch_size, randomness)
    about = (tuple(batched.flat()), batch_size, randomness)
    return remember_for(body, "vmap", inputs, about, make)


def _trace_vmapped_body(
    body: Body, inputs: Inputs[Any], batched: Inputs[bool], batch_size: int, randomness: str
) -> BatchedTrace:
    ask_tensors_for_sizes(body)
    _, plain = step_examples(dataclasses.replace(inputs, carry=[]))
    mode = fake_mode_of(inputs.flat())

    def carry_like(value: Any, flag: bool, given: bool) -> Any:
        shape = ((batch_size,) if flag else ()) + tuple(value.shape[1 if given else 0 :])
        return fake_tensor(mode, shape, None, value.dtype, value.device)

    def at(flags: Sequence[bool]) -> tuple[Callable[..., Any], list[Any]]:
        """Return the body for these batched carries, and examples for it."""
        carries = zip(inputs.carry, flags, batched.carry, strict=True)
        carry = [carry_like(*triple) for triple in carries]
        all_flags = [*flags, *batched.xs, *batched.additional]
        vmapped = _over_batch(body, all_flags, batch_size, randomness)
        return vmapped, [*carry, *plain.xs, *plain.additional]

    def output_flags(flags: Sequence[bool]) -> list[bool]:
        vmapped, examples = at(flags)
        with torch.no_grad():
            dims = run_fake(lambda *flat: vmapped(*flat)[1], examples, mode)
            return [d is not None for d in dims]

    flags, after = carry_fixpoint(batched.carry, output_flags)
    vmapped, examples = at(flags)
    with torch.no_grad():
        module = trace(_batch_in_front(vmapped, flags, batch_size), examples, mode)
        clean_up(module)
        legality.checked("vmap", module, inputs.signature)
    if is_backward(body):
        as_backward(module)
    return module, flags, list(after[len(flags) :])
