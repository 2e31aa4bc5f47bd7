"""Tell who is who in a scan's flat argument lists: carry, xs, additional -> carry, ys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import fx

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Inputs(Generic[Item]):
    """The inputs of a step, or of a whole scan: then ``carry`` is init, and xs are stacked."""

    carry: list[Item]
    xs: list[Item]
    additional: list[Item]

    def flat(self) -> list[Item]:
        return [*self.carry, *self.xs, *self.additional]

    def map(self, fn: Callable[[Item], Result]) -> Inputs[Result]:
        """
        >>> Inputs([1], [2], []).map(str)
        Inputs(carry=['1'], xs=['2'], additional=[])
        """
        return Inputs(
            [fn(v) for v in self.carry], [fn(v) for v in self.xs], [fn(v) for v in self.additional]
        )

    @property
    def signature(self) -> Signature:
        return Signature(len(self.carry), len(self.xs), len(self.additional))

    @property
    def trip_count(self) -> Any:
        """The number of steps, if these are the inputs of a whole scan over tensors."""
        x: Any = self.xs[0]
        return x.shape[0]


@dataclass(frozen=True)
class Outputs(Generic[Item]):
    carry: list[Item]
    ys: list[Item]

    def flat(self) -> list[Item]:
        return [*self.carry, *self.ys]


@dataclass(frozen=True)
class Signature:
    """Counts of each role.

    >>> Signature(1, 2, 1).split_inputs(["h", "a", "b", "w"])
    Inputs(carry=['h'], xs=['a', 'b'], additional=['w'])
    """

    n_carry: int
    n_xs: int
    n_additional: int

    @property
    def n_inputs(self) -> int:
        return self.n_carry + self.n_xs + self.n_additional

    def split_inputs(self, flat: Sequence[Item]) -> Inputs[Item]:
        assert len(flat) == self.n_inputs, (len(flat), self)
        return Inputs(
            list(flat[: self.n_carry]),
            list(flat[self.n_carry : self.n_carry + self.n_xs]),
            list(flat[self.n_carry + self.n_xs :]),
        )

    def split_outputs(self, flat: Sequence[Item]) -> Outputs[Item]:
        return Outputs(list(flat[: self.n_carry]), list(flat[self.n_carry :]))

    def inputs_of(self, body: fx.GraphModule) -> Inputs[fx.Node]:
        """Return the placeholders of ``body`` by role."""
        return self.split_inputs(body.graph.find_nodes(op="placeholder"))

    def outputs_of(self, body: fx.GraphModule) -> Outputs[Any]:
        """Return the results of ``body`` by role."""
        return self.split_outputs(results_of(body.graph))


def output_node(graph: fx.Graph) -> fx.Node:
    (output,) = graph.find_nodes(op="output")
    return output


def results_of(graph: fx.Graph) -> Any:
    """Return the results of ``graph``; a step's are a flat sequence."""
    return output_node(graph).args[0]
