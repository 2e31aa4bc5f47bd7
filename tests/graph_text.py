"""A captured graph as short text for snapshots: one line per node, bodies below the node.

Values are named by their op and their place in the graph, not by torch's own counters, which
differ between its versions: one snapshot serves them all.
"""

from __future__ import annotations

import itertools
import operator
import re
from typing import Any

import torch
from torch import fx

# torch's versions differ in how many of these they leave behind
_COPIES_OF_TORCH = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}

_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.int64: "i64",
    torch.bool: "b8",
}


def graph_text(module: fx.GraphModule) -> str:
    text = "\n".join(_lines(module))
    symbols = dict.fromkeys(re.findall(r"\bs\d+\b", text))
    numbers = {symbol: f"s{k}" for k, symbol in enumerate(symbols)}
    return re.sub(r"\bs\d+\b", lambda match: numbers[match[0]], text)


def _lines(module: fx.GraphModule) -> list[str]:
    names: dict[fx.Node, str] = {}
    arguments: list[str] = []
    lines: list[str] = []
    count = itertools.count()
    for node in module.graph.nodes:
        if node.op == "placeholder":
            names[node] = f"a{len(arguments)}"
            arguments.append(f"{names[node]}: {_type(node)}")
        elif node.op == "get_attr":
            names[node] = f"<{node.target}>"
            if isinstance(_attribute(module, node), fx.GraphModule):
                names[node] = "body"
        elif node.op == "output":
            lines.append(f"return {_text(node.args[0], names)}")
        elif node.target is operator.getitem:
            names[node] = f"{_text(node.args[0], names)}[{node.args[1]}]"
        elif node.target in _COPIES_OF_TORCH:
            names[node] = names[node.args[0]]
        elif not (_is_assertion(node) and not node.users):
            names[node] = f"v{next(count)}"
            lines.append(f"{names[node]}: {_type(node)} = {_call(node, names)}")
            for used in node.all_input_nodes:
                body = _attribute(module, used) if used.op == "get_attr" else None
                if isinstance(body, fx.GraphModule):
                    lines += ["  " + line for line in _lines(body)]
    indented = ["  " + line for line in lines]
    return [f"({', '.join(arguments)}) ->", *indented]


def _call(node: fx.Node, names: dict[fx.Node, str]) -> str:
    target: Any = node.target
    name = getattr(target, "_opname", None) or getattr(target, "__name__", None) or str(target)
    arguments = [_text(a, names) for a in node.args]
    arguments += [f"{k}={_text(v, names)}" for k, v in node.kwargs.items()]
    return f"{name}({', '.join(arguments)})"


def _is_assertion(node: fx.Node) -> bool:
    return "assert" in str(node.target) or "sym_constrain" in str(node.target)


def _attribute(module: fx.GraphModule, node: fx.Node) -> object:
    value: object = module
    for name in str(node.target).split("."):
        value = getattr(value, name, None)
    return value


def _text(value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, tuple | list):
        return f"[{', '.join(_text(v, names) for v in value)}]"
    return str(value)


def _type(node: fx.Node) -> str:
    value = node.meta.get("val", node.meta.get("example_value"))
    if isinstance(value, torch.Tensor):
        return f"{_DTYPES.get(value.dtype, value.dtype)}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, tuple | list):
        return "tuple"
    return str(value) if isinstance(value, torch.SymInt) else "?"
