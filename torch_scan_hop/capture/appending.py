"""What steps of an eager scan append to lists of the program, which happens after the scan.

No capture depends then on how many items a list has, or on how many steps there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torch_scan_hop import tree

#: by the kind of what a step appends: that of all steps, of what is stacked
_ROWS: dict[str, Callable[[torch.Tensor], Iterable[Any]]] = {
    "tensor": torch.Tensor.unbind,
    "number": torch.Tensor.tolist,
    "array": torch.Tensor.numpy,
}


def rows_in_order(columns: Iterable[Iterable[Any]], reverse: bool) -> list[tuple[Any, ...]]:
    """Return the rows of what each step appends, that of the first step at the front."""
    return list(zip(*columns, strict=True))[:: -1 if reverse else 1]


def append_row(items: list[Any], like: Any, leaves: Sequence[Any]) -> None:
    """Append what one step does, in the structure of the stacks."""
    items.extend(tree.unflatten(like, list(leaves)))


def with_rows_appended(
    ran: tuple[Any, Sequence[tuple[list[Any], Any, Sequence[str]]]], reverse: bool = False
) -> Any:
    """Return the first part of ``ran``; the second says of lists what all steps append to each: in
    their order the rows of stacks, which are of kinds.

    >>> losses = [0.5]
    >>> with_rows_appended((None, [(losses, (torch.tensor([1.5, 2.5]),), ("number",))]))
    >>> losses
    [0.5, 1.5, 2.5]
    """
    results, appended = ran
    for items, stacks, kinds in appended:
        pairs = zip(tree.tensors(stacks), kinds, strict=True)
        for row in rows_in_order((_ROWS[kind](stack) for stack, kind in pairs), reverse):
            append_row(items, stacks, row)
    return results
