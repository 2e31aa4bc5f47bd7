"""A step in a kernel with a loop over time: the names of its values, and how it reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import sympy

from torch_scan_hop._torch.inductor_inline import InlineLowering
from torch_scan_hop._torch.inductor_values import OpsHandler, masked, named_input, slice_at
from torch_scan_hop.signature import Inputs


def variable(name: str) -> Any:
    """Return a symbol for an index, which is printed as it is."""
    return sympy.Symbol(name, integer=True, nonnegative=True)


def plain_symbol(number: int) -> Any:
    """Return a variable of Inductor's kernels in C++; by another prefix it were an argument."""
    return variable(f"x{number}")


STEP = plain_symbol(999)  # in the order that steps run
TILE = plain_symbol(998)
CARRY = "scan_carry_"


def are_static(sizes: Iterable[Any]) -> bool:
    """Return True if all are numbers: none of them is, or has, a symbol."""
    return all(isinstance(n, (int, sympy.Integer)) for n in sizes)


def lane_symbols(rank: int) -> list[Any]:
    return [plain_symbol(k) for k in range(rank)]


def carry_position(name: str) -> int | None:
    """Return the position of the carry that a buffer's name stands for, or None."""
    return int(name.removeprefix(CARRY)) if name.startswith(CARRY) else None


def step_inputs(roles: Inputs[Any], index: Any) -> list[Any]:
    """Return a body's inputs for lowering: carries by name, xs at ``index``, additional ones."""
    return [
        *(named_input(f"{CARRY}{k}", c) for k, c in enumerate(roles.carry)),
        *(slice_at(index, x) for x in roles.xs),
        *roles.additional,
    ]


class StepOps(OpsHandler):
    """Reads carry ``k`` by ``read(k, index)``; what is computed behind a mask is local to it."""

    def __init__(
        self, inner: Any, lowering: InlineLowering, read: Callable[[int, Any], Any]
    ) -> None:
        super().__init__(inner)
        self.lowering = lowering
        self.read = read

    def load(self, name: str, index: Any) -> Any:
        position = carry_position(name)
        if position is not None:
            return self.read(position, index)
        return self._inner.load(name, index)

    def masked(self, mask: Any, body: Callable[[], Any], other: Any) -> Any:
        def scoped() -> Any:
            with self.lowering.scope_of_values():
                return body()

        return masked(self._inner, mask, scoped, other)
