"""What steps of an eager scan append to lists of the program, which happens after the scan.

No capture depends then on how many items a list has, or on how many steps there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torch_scan_hop import tree

#: the rows of a stack, which a program may write to; torch 2.9 declares that it returns nothing
own_rows: Callable[[torch.Tensor], Sequence[torch.Tensor]] = vars(torch)["unbind_copy"]
#: by the kind of what a step appends: that of all steps, of what is stacked
_ROWS: dict[str, Callable[[torch.Tensor], Iterable[Any]]] = {
    "tensor": own_rows,
    "number": torch.Tensor.tolist,
    "array": torch.Tensor.numpy,
}


def rows_in_order(columns: Iterable[Iterable[Any]], reverse: bool) -> list[tuple[Any, ...]]:
    """Return the rows of what each step appends, that of the first step at the front."""
    return list(zip(*columns, strict=True))[:: -1 if reverse else 1]


def append_row(items: list[Any], like: Any, leaves: Sequence[Any]) -> None:
    """Append what one step does, in the structure of the stacks."""
    items.extend(tree.unflatten(like, list(leaves)))


def let_last_be(items: list[Any], like: Any, known: Sequence[Any]) -> None:
    """Let what the last step has appended be the tensors that are ``known`` of it, which are state,
    too: a later write to one is seen in both."""
    if any([one is not None for one in known]):
        last = items[-len(like) :]
        leaves = [
            leaf if one is None else one
            for leaf, one in zip(tree.tensors(last), known, strict=True)
        ]
        items[-len(like) :] = tree.unflatten(last, leaves)


def with_rows_appended(ran: tuple[Any, Sequence[Sequence[Any]]], reverse: bool = False) -> Any:
    """Return the first part of ``ran``; the second says of lists what all steps append to each: in
    their order the rows of stacks, which are of kinds, and what is known of the last.

    >>> losses = [0.5]
    >>> stacks = (torch.tensor([1.5, 2.5]),)
    >>> with_rows_appended((None, [(losses, stacks, ("number",), (None,))]))
    >>> losses
    [0.5, 1.5, 2.5]
    """
    results, appended = ran
    for items, stacks, kinds, last in appended:
        pairs = zip(tree.tensors(stacks), kinds, strict=True)
        rows = rows_in_order((_ROWS[kind](stack) for stack, kind in pairs), reverse)
        for row in rows:
            append_row(items, stacks, row)
        if rows:
            let_last_be(items, stacks, last)
    return results
