"""What a rewrite may assume of a graph, and must leave as it found it.

Each of these was once broken by a rewrite that was right for the case it was written for. They
are stated here once, and in tests a :class:`~torch_scan_hop.legality.checker.Checker` holds every
graph against them after each rewrite, so that what breaks one is named by the rewrite that did:

``structure``  a graph of ATen operators, with the inputs and outputs that its signature says
``writes``     nothing is written in place: what a step makes may be made once, for all steps
``values``     what is recorded of each value is what running its operator gives
``moves``      what leaves the loop gives the same there: no carry, no random draw, no effect, and
               only operators whose batching is known to be right

Every rewrite calls one of the functions here when it is done. They do nothing in production.
The last graphs that are checked are those of ``inductor.body.destination_passing`` (its writes are
declared) and ``eager.fuse.fused``. What comes after is text: eager's source, whose ``out=``
write over values that end there, and Inductor's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import fx

from torch_scan_hop.signature import Inputs, Signature


class IllegalRewrite(AssertionError):
    """A rewrite gave what no rewrite may give."""


class CheckAfterEach(Protocol):
    """What is called after each rewrite; see ``checker`` for what each method is told."""

    def graph(self, name: str, module: fx.GraphModule, *args: Any, **kwargs: Any) -> None: ...
    def functional(self, name: str, module: fx.GraphModule) -> None: ...
    def bodies(self, name: str, module: fx.GraphModule) -> None: ...
    def replacement(self, name: str, module: fx.GraphModule) -> None: ...
    def decisions(self, name: str, body: Any, signature: Signature, decisions: Any) -> None: ...
    def plan(self, name: str, plan: Any) -> None: ...
    def partition(self, name: str, joint: Any, partition: Any) -> None: ...
    def operands(self, name: str, body: Any, operands: Inputs[Any]) -> None: ...
    def stacks(self, name: str, stacks: Any, trip_count: Any) -> None: ...
    def rows(self, name: str, nodes: Sequence[Any], values: Sequence[Any]) -> None: ...
    def results(self, name: str, inputs: Sequence[Any], results: Sequence[Any]) -> None: ...


#: None in production: then a rewrite spends one comparison on this
check_after_each: CheckAfterEach | None = None


def checked(name: str, module: fx.GraphModule, *args: Any, **kwargs: Any) -> fx.GraphModule:
    """``module``, as the rewrite of this name has made it; see ``Checker.graph``."""
    if check_after_each is not None:
        check_after_each.graph(name, module, *args, **kwargs)
    return module


def run_passes(module: fx.GraphModule, passes: Sequence[Callable[[fx.Graph], None]]) -> None:
    """Rewrites of one graph, one after the other; each is checked by its name."""
    for rewrite in passes:
        rewrite(module.graph)
        checked(rewrite.__name__, module)
