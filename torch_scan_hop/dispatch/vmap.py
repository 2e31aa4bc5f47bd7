"""vmap: a scan of the vmapped body.

Before: carry_k, x_k, additional_k, each batched at some dimension or not.
After:  batched carries [B, ...], batched xs [T, B, ...], batched additional inputs [B, ...];
a carry is batched if its init is, or if a step makes it so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torch_scan_hop import legality
from torch_scan_hop._torch.operators import TransformType
from torch_scan_hop._torch.tracing import fake_mode_of, fake_tensor, run_fake, trace
from torch_scan_hop._torch.transforms import restore_vmap, unwrap_batched, wrap_batched
from torch_scan_hop.autodiff.custom import refuse_custom_function
from torch_scan_hop.autodiff.differentiability import carry_fixpoint
from torch_scan_hop.examples import step_examples
from torch_scan_hop.graph_cleanup import clean_up
from torch_scan_hop.memo import autocast_state, inputs_metadata, remember
from torch_scan_hop.op import Body, scan_op
from torch_scan_hop.signature import Signature
from torch_scan_hop.stops import with_stops


def _move(value: Any, source: int | None, target: int) -> Any:
    return value if source is None else torch.movedim(value, source, target)


class VmappedBody:
    """``body`` over a batch; the flags say which of its inputs have a batch dimension 0."""

    def __init__(
        self, body: Body, batch_size: int, randomness: str, flags: Sequence[bool], n_carry: int
    ) -> None:
        self.body = with_stops(body)
        self.batch_size = batch_size
        self.randomness = randomness
        self.flags = list(flags)
        self.n_carry = n_carry

    def _vmapped(self, flat: Sequence[Any]) -> tuple[list[Any], list[int | None]]:
        in_dims = tuple(0 if flag else None for flag in self.flags)
        out, out_dims = restore_vmap(
            lambda *args: tuple(self.body(*args)), in_dims, self.batch_size, self.randomness
        )(*flat)
        return list(out), list(out_dims)

    def output_dims(self, *flat: Any) -> list[int | None]:
        return self._vmapped(flat)[1]

    def __call__(self, *flat: Any) -> tuple[Any, ...]:
        results = []
        for k, (out, dim) in enumerate(zip(*self._vmapped(flat), strict=True)):
            if dim is not None:
                results.append(torch.movedim(out, dim, 0))
            elif k < self.n_carry and self.flags[k]:
                results.append(out.unsqueeze(0).expand(self.batch_size, *out.shape))
            else:
                results.append(out)
        return tuple(results)


def _batched_init(value: Any, flag: bool, batched: bool, batch_size: int) -> Any:
    """An unbatched init of a carry that a step batches is expanded."""
    if flag and not batched:
        return value.unsqueeze(0).expand(batch_size, *value.shape)
    return value


@scan_op.py_impl(TransformType.Vmap)
def vmap(
    interpreter: Any,
    combine_fn: Body,
    init: list[Any],
    xs: list[Any],
    additional_inputs: tuple[Any, ...],
    **options: Any,
) -> Any:
    level, batch_size = interpreter.level(), interpreter.batch_size()
    groups, in_dims = unwrap_batched((list(init), list(xs), list(additional_inputs)), level)
    dims = _flat_dims(groups, in_dims)
    n_carry = len(init)
    with interpreter.lower():
        init = [_move(v, d, 0) for v, d in zip(groups[0], dims[0], strict=True)]
        xs = [_move(v, d, 1) for v, d in zip(groups[1], dims[1], strict=True)]
        additional = [_move(v, d, 0) for v, d in zip(groups[2], dims[2], strict=True)]
        body, carry_flags, y_flags = _vmapped_body(
            combine_fn, init, xs, additional, dims, batch_size, interpreter.randomness()
        )
        init = [
            _batched_init(v, flag, d is not None, batch_size)
            for v, flag, d in zip(init, carry_flags, dims[0], strict=True)
        ]
        results = scan_op(body, init, xs, tuple(additional), **options)
    out_dims = (
        *(0 if flag else None for flag in carry_flags),
        *(1 if flag else None for flag in y_flags),
    )
    assert len(results) == n_carry + len(y_flags)
    return wrap_batched(tuple(results), out_dims, level)


def _flat_dims(groups: Any, in_dims: Any) -> list[list[int | None]]:
    if in_dims is None:
        return [[None] * len(group) for group in groups]
    flat = list(in_dims) if isinstance(in_dims, (list, tuple)) else [in_dims]
    return [list(dims) for dims in flat]


def _vmapped_body(
    body: Body,
    init: Sequence[Any],
    xs: Sequence[Any],
    additional: Sequence[Any],
    dims: list[list[int | None]],
    batch_size: int,
    randomness: str,
) -> tuple[fx.GraphModule, tuple[bool, ...], list[bool]]:
    """The traced body, and which carries and ys it batches."""
    batched = [[d is not None for d in group] for group in dims]

    refuse_custom_function(body)

    def make() -> tuple[fx.GraphModule, tuple[bool, ...], list[bool]]:
        _, plain = step_examples([], xs, additional)
        mode = fake_mode_of([*init, *xs, *additional])

        def at(flags: Sequence[bool]) -> tuple[VmappedBody, list[Any]]:
            carry = [
                fake_tensor(
                    mode,
                    ((batch_size,) if flag else ()) + tuple(c.shape[1 if given else 0 :]),
                    None,
                    c.dtype,
                    c.device,
                )
                for c, flag, given in zip(init, flags, batched[0], strict=True)
            ]
            vmapped = VmappedBody(
                body, batch_size, randomness, [*flags, *batched[1], *batched[2]], len(init)
            )
            return vmapped, [*carry, *plain.xs, *plain.additional]

        def output_flags(flags: Sequence[bool]) -> list[bool]:
            vmapped, examples = at(flags)
            with torch.no_grad():
                return [d is not None for d in run_fake(vmapped.output_dims, examples, mode)]

        flags = carry_fixpoint(batched[0], lambda f: output_flags(f)[: len(init)])
        vmapped, examples = at(flags)
        with torch.no_grad():
            module = trace(vmapped, examples, mode)
            clean_up(module)
            legality.checked("vmap", module, Signature(len(init), len(xs), len(additional)))
        return module, flags, output_flags(flags)[len(init) :]

    key = (
        "vmap",
        inputs_metadata(init, xs, additional),
        tuple(map(tuple, batched)),
        batch_size,
        randomness,
        autocast_state(),
    )
    return remember(body, key, make)
