"""Capture the graph of a call for a reader; nothing of it is run."""

from __future__ import annotations

import contextlib
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew

from torch_scan_hop._torch.dynamo.contexts import (
    no_code_is_kept,
    no_logs_of_mistakes,
    without_dispatch_modes,
)
from torch_scan_hop._torch.dynamo.variables import example_value
from torch_scan_hop._torch.replaced import wrapped


def capture_graph(
    fn: Callable[..., Any], args: Any, closure: tuple[str, ...] | None = None
) -> tuple[fx.GraphModule, list[Any], list[str], list[Any], Any]:
    """Return the torch-level graph of ``fn(*args)``; nothing of it is run.

    The result is (graph, the value that stands for each placeholder, its name, for each leaf of the
    result its position among the graph's outputs or the input that it is, the result's spec).
    ``closure``: the names of the variables in cells, if not those of ``fn``.
    """
    found: list[Any] = []  # Dynamo keeps backends, and what they return: it is emptied

    def backend(gm: fx.GraphModule, examples: Any) -> Callable[..., Any]:
        found.append(gm)
        return stand_in

    def stand_in(*values: Any) -> Any:
        # never the function's results: Dynamo only rebuilds their structure
        (output,) = found[0].graph.find_nodes(op="output")
        likes = [example_value(n) for n in output.args[0]]
        outputs = [
            torch.empty(v.shape, dtype=v.dtype, device="meta") if isinstance(v, torch.Tensor) else v
            for v in likes
        ]
        found.extend([list(values), outputs])
        return outputs

    with (
        compile_lock,
        fresh_code(fn) as copy,
        without_dispatch_modes(),
        no_code_is_kept(),
        no_logs_of_mistakes(),
        _objects_stay_as_they_are(),
    ):
        result = torch.compile(copy, backend=backend, fullgraph=True, dynamic=False)(*args)
    gm, values, outputs = found
    found.clear()
    if closure is None:
        closure = getattr(getattr(fn, "__code__", None), "co_freevars", ())
    names = [_source_name(closure, n) for n in gm.graph.find_nodes(op="placeholder")]
    leaves, spec = pytree.tree_flatten(result)
    position = {id(v): k for k, v in enumerate(outputs)}
    return gm, values, names, [position.get(id(leaf), leaf) for leaf in leaves], spec


def _objects_stay_as_they_are() -> contextlib.AbstractContextManager[None]:
    """Let a captured graph assign nothing to the program's objects when it is called."""

    def new_objects(original: Any, self: SideEffects) -> list[Any]:
        made = (AttributeMutationNew, ValueMutationNew)
        return [v for v in original(self) if isinstance(v.mutation_type, made)]

    return wrapped(SideEffects, _get_modified_vars=new_objects)


@contextlib.contextmanager
def fresh_code(fn: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Return ``fn`` with nothing of it in Dynamo's cache, so that the backend is called."""
    if isinstance(fn, types.FunctionType):
        copy = types.FunctionType(
            fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
        )
        copy.__kwdefaults__ = fn.__kwdefaults__
        yield copy
    else:
        yield lambda *args: fn(*args)


def _source_name(names: tuple[str, ...], placeholder: fx.Node) -> str:
    """Return the name of a captured variable in the user's code."""
    source = getattr(placeholder, "_dynamo_source", None)
    if source is None:
        source = getattr(placeholder.meta.get("grapharg"), "source", None)
    if source is None:
        return placeholder.name
    name = source.name() if callable(source.name) else source.name
    cells = re.search(r"__closure__\[(\d+)\]\.cell_contents(.*)$", name)
    if cells:
        return (names[int(cells[1])] if int(cells[1]) < len(names) else "closure") + cells[2]
    simple = re.match(r"^[LG]\[['\"](\w+)['\"]\](.*)$", name)
    return simple[1] + simple[2] if simple else placeholder.name
