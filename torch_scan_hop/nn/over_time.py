"""A cell over the steps of a batch of sequences, some of which may be shorter than others.

Everything is time first here: inputs are ``[T, B, ...]``, what is valid of them ``[T, B]``.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from torch_scan_hop import tree
from torch_scan_hop._torch.operators import is_plain_tensor
from torch_scan_hop.api import scan
from torch_scan_hop.body.per_object import PerObject
from torch_scan_hop.capture.refusals import refused
from torch_scan_hop.errors import ScanTypeError, ScanValueError, describe

#: ``cell(x, state)`` gives the next state, or ``(y, next state)``
Cell = Callable[[Any, Any], Any]


def valid_steps(lengths: Tensor | Sequence[int], padded: Tensor) -> Tensor:
    """Return ``[T, B]``: whether each step of ``padded``, ``[T, B, ...]``, is in its sequence."""
    given = torch.as_tensor(lengths)
    lengths = given.to(padded.device)
    if lengths.shape != padded.shape[1:2] or lengths.is_floating_point():
        raise refused(
            ScanValueError,
            f"lengths must be one integer for each of the {padded.shape[1]} sequences, but got "
            f"{describe(lengths)}.",
        )
    # values are looked at where that waits for no device and stops no trace
    if not torch.compiler.is_compiling() and given.device.type == "cpu" and is_plain_tensor(given):
        _check_range(given.tolist(), padded.shape[0])
    return torch.arange(padded.shape[0], device=padded.device).unsqueeze(1) < lengths


def _check_range(lengths: Sequence[int], steps: int) -> None:
    for k, length in enumerate(lengths):
        if not 0 <= length <= steps:
            raise refused(
                ScanValueError,
                f"lengths must be between 0 and {steps}, the number of steps, but lengths[{k}] is "
                f"{length}.",
            )


def over_time(
    cell: Cell,
    inputs: Any,
    state: Any,
    *,
    layer: nn.Module,
    valid: Tensor | None = None,
    reverse: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    """Return ``(ys, last state)``; what is captured is kept for ``layer``.

    If a step is not valid, the state stays and y is zero. What is in the padding of such a step
    affects nothing, not even as a nan, because the cell is given a valid input.
    """
    if valid is None:
        run = lambda state, x: _next(cell, x, state)  # noqa: E731
        state, ys = scan(_of_layer(run, layer), state, inputs, reverse=reverse, **options)
        return ys, state
    inputs = pytree.tree_map(lambda leaf: _where(valid, leaf, _stand_in(valid, leaf)), inputs)

    def step(state: Any, now: tuple[Any, Tensor]) -> tuple[Any, Any]:
        x, is_valid = now
        after, y = _next(cell, x, state)
        after = pytree.tree_map(lambda new, old: _where(is_valid, new, old), after, state)
        return after, pytree.tree_map(lambda v: _where(is_valid, v, v.new_zeros(())), y)

    state, ys = scan(_of_layer(step, layer), state, (inputs, valid), reverse=reverse, **options)
    return ys, state


# The code of each layer's steps, by name. Captures are kept by code, as many as one body needs.
# This module's functions are the bodies of all layers, so each layer has a copy of their code.
_codes = PerObject[dict[str, types.CodeType]]()


def _of_layer(step: Any, layer: nn.Module) -> Any:
    if torch.compiler.is_dynamo_compiling():
        return step
    codes = _codes.kept_or(layer, {})
    code = codes.get(step.__name__)
    if code is None:
        code = codes[step.__name__] = step.__code__.replace()
    return types.FunctionType(code, step.__globals__, step.__name__, None, step.__closure__)


def _next(cell: Cell, x: Any, state: Any) -> tuple[Any, Any]:
    """Return ``(next state, y)``, in whichever of its two forms the cell returns them."""
    result = cell(x, state)
    form = pytree.tree_structure(state)
    if pytree.tree_structure(result) == form:
        return result, pytree.tree_leaves(result)[0]
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not is_pair or pytree.tree_structure(result[1]) != form:
        raise refused(
            ScanTypeError,
            "a cell must return the next state, or (y, next state), and the state is "
            f"{describe(state)}, but the cell returned {describe(result)}.",
        )
    return result[1], result[0]


def _stand_in(valid: Tensor, value: Tensor) -> Tensor:
    """Return the batch's first valid x, at which the cell can be differentiated. At zeros a
    logarithm or a root has no finite derivative, and weights would get the gradient 0 * inf."""
    none = torch.ones_like if value.is_floating_point() or value.is_complex() else torch.zeros_like
    if valid.numel() == 0:
        return none(value)
    first = valid.flatten().int().argmax().view(1)
    row = value.flatten(0, 1).index_select(0, first)
    return torch.where(valid.any(), row, none(row)).detach()


def _where(valid: Tensor, value: Tensor, other: Tensor) -> Tensor:
    """Choose by ``valid``, which has the leading dimensions of ``value``."""
    shape = [*valid.shape, *[1] * (value.dim() - valid.dim())]
    return torch.where(valid.view(shape), value, other)


def run_packed(
    run: Callable[[Tensor, Any, Tensor], tuple[Any, Any]],
    sequence: PackedSequence,
    state: Any,
    batch_dim: int,
) -> tuple[PackedSequence, Any]:
    """Run ``run(padded, state, valid)`` on a packed sequence, which is sorted, longest first."""
    padded, lengths = pad_packed_sequence(PackedSequence(sequence.data, sequence.batch_sizes))
    state = _permuted(state, sequence.sorted_indices, batch_dim)
    ys, state = run(padded, state, valid_steps(lengths, padded))
    packed = sequence._replace(data=pack_padded_sequence(ys, lengths).data)
    return packed, _permuted(state, sequence.unsorted_indices, batch_dim)


def _permuted(state: Any, order: Tensor | None, dim: int) -> Any:
    """Put the batch, which is ``dim`` of every leaf, in another order."""
    if order is None:
        return state
    return tree.map_leaves(lambda leaf: leaf.index_select(dim, order), state)
