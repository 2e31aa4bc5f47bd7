"""Any cell as a layer, in one direction or in two, and several of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torch_scan_hop.capture.refusals import refused
from torch_scan_hop.errors import ScanTypeError, ScanValueError, describe
from torch_scan_hop.nn.over_time import Cell, over_time, run_packed, valid_steps


class Recurrent(nn.Module):
    """A cell as a layer: ``cell(x, state)`` for every step of a sequence.

    Args:
        cell: a module or a function, ``(x, state) -> state`` or ``(x, state) -> (y, state)``:
            ``nn.LSTMCell``, ``nn.GRUCell``, ``nn.RNNCell``, or one of your own. ``x`` is
            ``[B, ...]``, and so is every leaf of the state. In the first form, y is the state's
            first leaf.
        batch_first: inputs and outputs are ``[B, T, ...]``; otherwise ``[T, B, ...]``.
        reverse: go from the last step to the first. A padded sequence begins at its own last step.
        recurrent_dropout: the part of the state's first leaf that the cell reads as zero, in
            training: one mask for a whole sequence.
        zoneout: the part of the state that stays as it is in a step, in training, drawn anew in
            each; in evaluation, the mean of that.
        checkpoint, compile: as for :func:`torch_scan_hop.scan`.

    Example:
        >>> layer = Recurrent(nn.LSTMCell(3, 4), batch_first=True)
        >>> ys, (h, c) = layer(torch.ones(2, 5, 3), lengths=[5, 2])
        >>> ys.shape, h.shape, bool((ys[1, 2:] == 0).all()), bool((h[1] == ys[1, 1]).all())
        (torch.Size([2, 5, 4]), torch.Size([2, 4]), True, True)
    """

    def __init__(
        self,
        cell: Cell,
        *,
        batch_first: bool = False,
        reverse: bool = False,
        recurrent_dropout: float = 0.0,
        zoneout: float = 0.0,
        checkpoint: Any = None,
        compile: bool | None = None,
    ) -> None:
        super().__init__()
        if not callable(cell):
            raise refused(
                ScanTypeError, f"Recurrent: cell must be callable, but got {describe(cell)}."
            )
        for name, part in (("recurrent_dropout", recurrent_dropout), ("zoneout", zoneout)):
            check_probability("Recurrent", name, part)
        self.cell, self.batch_first, self.reverse = cell, batch_first, reverse
        self.recurrent_dropout, self.zoneout = recurrent_dropout, zoneout
        self.options = {"checkpoint": checkpoint, "compile": compile}

    def extra_repr(self) -> str:
        return f"batch_first={self.batch_first}, reverse={self.reverse}"

    def forward(
        self,
        input: Any,
        initial_state: Any = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Any, Any]:
        """Return ``(ys, last state)``.

        Args:
            input: a tensor or a pytree of tensors, or a ``PackedSequence``, which gives one.
            initial_state: ``[B, ...]`` leaves. None: ``cell.initial_state(x)`` of the first step,
                if there is such a method, or zeros of the cell's ``hidden_size``.
            lengths: of each sequence, ``[B]``. The last state is that of the last valid step; with
                a length of 0 it is the initial one. ys past the end are zero.
            mask: the same in general: True where a step is valid, in the input's first two
                dimensions.

        Raises:
            TypeError: both ``lengths`` and ``mask``, or one of them and a ``PackedSequence``; a
                cell without an initial state; a cell that returns something else.
            ValueError: ``lengths`` or ``mask`` of another shape; a length that is negative or above
                ``T``, in eager mode and where they are given on the CPU.
        """
        if isinstance(input, PackedSequence):
            if lengths is not None or mask is not None:
                raise refused(
                    ScanTypeError, "Recurrent: a PackedSequence has lengths of its own: pass none."
                )
            return run_packed(self._run, input, initial_state, 0)
        if self.batch_first:
            input = pytree.tree_map(lambda leaf: leaf.transpose(0, 1), input)
            mask = None if mask is None else mask.transpose(0, 1)
        ys, state = self._run(input, initial_state, _valid(input, lengths, mask))
        if self.batch_first:
            ys = pytree.tree_map(lambda leaf: leaf.transpose(0, 1), ys)
        return ys, state

    def _run(self, inputs: Any, state: Any, valid: Tensor | None) -> tuple[Any, Any]:
        if state is None:
            state = _initial_state(self.cell, pytree.tree_map(lambda leaf: leaf[0], inputs))
        cell = self._regularized(state)
        how = {"layer": self, "valid": valid, "reverse": self.reverse, **self.options}
        return over_time(cell, inputs, state, **how)

    def _regularized(self, state: Any) -> Cell:
        cell, zoneout, training = self.cell, self.zoneout, self.training
        if not zoneout and not (self.recurrent_dropout and training):
            return cell
        first = pytree.tree_leaves(state)[0]
        mask = F.dropout(torch.ones_like(first), self.recurrent_dropout, training)

        def kept(new: Tensor, old: Tensor) -> Tensor:
            if not training:
                return torch.lerp(new, old, zoneout)
            return torch.where(torch.rand_like(new) < zoneout, old, new)

        def regularized(x: Any, state: Any) -> Any:
            (first, *others), spec = pytree.tree_flatten(state)
            result = cell(x, pytree.tree_unflatten([first * mask, *others], spec))
            if not zoneout:
                return result
            if pytree.tree_structure(result) == spec:
                return pytree.tree_map(kept, result, state)
            y, after = result
            return y, pytree.tree_map(kept, after, state)

        return regularized


class Bidirectional(nn.Module):
    """Two layers, of which the second goes backwards; their ys are concatenated.

    Args:
        forward, backward: :class:`Recurrent` layers of one ``batch_first``; ``backward`` has
            ``reverse=True``, ``forward`` has not.

    The call is that of :class:`Recurrent`; states are pairs.

    Example:
        >>> layer = Bidirectional(
        ...     Recurrent(nn.GRUCell(3, 4)), Recurrent(nn.GRUCell(3, 4), reverse=True)
        ... )
        >>> ys, (h, h_backward) = layer(torch.ones(5, 2, 3), lengths=[5, 2])
        >>> ys.shape, bool((h_backward == ys[0, :, 4:]).all())
        (torch.Size([5, 2, 8]), True)
    """

    def __init__(self, forward: Recurrent, backward: Recurrent) -> None:
        super().__init__()
        if forward.reverse or not backward.reverse or forward.batch_first != backward.batch_first:
            raise refused(
                ScanValueError,
                "Bidirectional: backward must be a layer with reverse=True, forward one without, "
                f"and batch_first the same, but got ({forward.extra_repr()}) and "
                f"({backward.extra_repr()}).",
            )
        self.directions = nn.ModuleList([forward, backward])

    def forward(self, input: Any, initial_state: Any = None, **valid: Any) -> tuple[Any, Any]:
        states = (None, None) if initial_state is None else initial_state
        pairs = zip(self.directions, states, strict=True)
        (ys, state), (ys_back, state_back) = [run(input, s, **valid) for run, s in pairs]
        if isinstance(ys, PackedSequence):
            ys = ys._replace(data=torch.cat([ys.data, ys_back.data], -1))
        else:
            ys = pytree.tree_map(lambda a, b: torch.cat([a, b], -1), ys, ys_back)
        return ys, (state, state_back)


class Stack(nn.Module):
    """Layers one after another, with dropout between them; states are lists.

    Args:
        layers: :class:`Recurrent`, :class:`Bidirectional`, or modules that are called as they are.
        dropout: of the ys of all layers but the last one, in training.

    Example:
        >>> stack = Stack([Recurrent(nn.GRUCell(3, 4)), Recurrent(nn.GRUCell(4, 4))], dropout=0.1)
        >>> ys, states = stack(torch.ones(5, 2, 3))
        >>> ys.shape, len(states)
        (torch.Size([5, 2, 4]), 2)
    """

    def __init__(self, layers: Sequence[nn.Module], dropout: float = 0.0) -> None:
        super().__init__()
        check_probability("Stack", "dropout", dropout)
        self.layers, self.dropout = nn.ModuleList(layers), dropout

    def forward(self, input: Any, initial_state: Any = None, **valid: Any) -> tuple[Any, Any]:
        states = [None] * len(self.layers) if initial_state is None else initial_state
        last = []
        for k, (layer, state) in enumerate(zip(self.layers, states, strict=True)):
            if k and self.dropout:
                input = dropped(input, self.dropout, self.training)
            input, state = layer(input, state, **valid)
            last.append(state)
        return input, last


def dropped(input: Any, part: float, training: bool) -> Any:
    """Apply dropout to a tensor, to a pytree of them, or to a ``PackedSequence``."""
    if isinstance(input, PackedSequence):
        return input._replace(data=F.dropout(input.data, part, training))
    return pytree.tree_map(lambda leaf: F.dropout(leaf, part, training), input)


def check_probability(where: str, name: str, part: Any) -> None:
    if isinstance(part, bool) or not isinstance(part, (int, float)) or not 0 <= part <= 1:
        raise refused(
            ScanValueError,
            f"{where}: {name} must be a number in the range [0, 1], but got {part!r}.",
        )


def _valid(input: Any, lengths: Any, mask: Tensor | None) -> Tensor | None:
    first = pytree.tree_leaves(input)[0]
    if lengths is None and mask is None:
        return None
    if lengths is not None and mask is not None:
        raise refused(ScanTypeError, "Recurrent: pass lengths or mask, not both.")
    if mask is None:
        return valid_steps(lengths, first)
    if mask.dtype != torch.bool or mask.shape != first.shape[:2]:
        raise refused(
            ScanValueError,
            "Recurrent: mask must hold a bool for each step of each sequence, [T, B] (or [B, T] "
            f"with batch_first=True), but the input is {describe(first)}, time first, and mask "
            f"is {describe(mask)}.",
        )
    return mask


def _initial_state(cell: Cell, x: Any) -> Any:
    own = getattr(cell, "initial_state", None)
    if own is not None:
        return own(x)
    size = getattr(cell, "hidden_size", None)
    if size is None:
        raise refused(
            ScanTypeError,
            "Recurrent: the cell has no hidden_size, so its initial state is not known. Pass "
            "initial_state, or give the cell a method initial_state(x).",
        )
    first = pytree.tree_leaves(x)[0]
    like = next(cell.parameters(), first) if isinstance(cell, nn.Module) else first
    zeros = like.new_zeros(first.shape[0], size)
    return (zeros, zeros) if isinstance(cell, nn.LSTMCell) else zeros
