"""What Python makes of numbers alone, in a body: exact, as Python makes it.

A number that steps carry is a scalar tensor in the body's graph. Python computes ``1 - 0.9 ** n``
in double precision, and torch computes it of such scalars in the default dtype. So these nodes are
made double, and what they give is rounded where a tensor meets it. ``n += 1`` makes a new number,
and leaves other names of the old one alone.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import fx

from torch_scan_hop import tree
from torch_scan_hop._torch.dynamo.errors import Unsupported
from torch_scan_hop._torch.dynamo.made_numbers import NUMBER
from torch_scan_hop._torch.symbols import SYMBOLS
from torch_scan_hop.capture.number_domains import add_conditions
from torch_scan_hop.capture.user_code import users_line
from torch_scan_hop.errors import NUMBER_OF_TENSOR
from torch_scan_hop.op import scan_op
from torch_scan_hop.signature import output_node

IN_PLACE: dict[Any, Any] = {
    getattr(operator, f"i{name}"): getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift")
}
IN_PLACE |= {operator.iand: operator.and_, operator.ior: operator.or_, operator.ixor: operator.xor}
#: by what a graph calls: a TorchFunctionMode, as a default device is, makes methods of them, and
#: torch 2.9 of two
COMPARISONS: dict[Any, Callable[[Any, Any], Any]] = {
    key: getattr(operator, name)
    for name in "eq ne lt le gt ge".split()
    for key in (getattr(operator, name), name, f"__{name}__")
}
_UNARY = {operator.neg, operator.pos, operator.abs, operator.invert}
#: what Dynamo makes of min and max
_EXTREMES = {torch.clamp, torch.minimum, torch.maximum}
#: functions of math that torch has by the same name; torch returns nan where math raises
_MATH = (
    "sqrt exp expm1 log log2 log10 log1p sin cos tan sinh cosh tanh asin acos atan erf erfc"
).split()
#: by what Python calls: the name that :func:`of_number` is given
FUNCTIONS = {
    **{getattr(math, name): name for name in _MATH},
    **{math.floor: "floor", math.ceil: "ceil", math.trunc: "int", math.fabs: "fabs"},
    **{int: "int", float: "float", round: "round", divmod: "floordiv mod"},
    **{math.pow: "pow", bool: "bool", operator.not_: "not"},
}
_TORCHS: dict[str, Callable[..., torch.Tensor]] = {
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    **{name: getattr(torch, name) for name in _MATH},
    "pow": lambda base, exponent: (base * 1.0) ** exponent,
    "bool": lambda number: number != 0,
    "not": lambda number: number == 0,
    "float": lambda number: number * 1.0,
    "fabs": lambda number: (number * 1.0).abs(),
    "int": lambda number: number.to(torch.int64),
    # times 1, since torch rounds no flags
    "floor": lambda number: torch.floor(number * 1).to(torch.int64),
    "ceil": lambda number: torch.ceil(number * 1).to(torch.int64),
    "round": lambda number: torch.round(number * 1).to(torch.int64),
}


def of_number(name: str, *numbers: Any) -> torch.Tensor:
    """Return what a function of Python makes of numbers, of which steps carry some."""
    return _TORCHS[name](*numbers)


def value_of(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``tensor.item()`` as a scalar: without a gradient, and as it is now.

    >>> value_of(torch.tensor([3], dtype=torch.int8), torch.int64)
    tensor(3)
    """
    return tensor.detach().clone().reshape(()).to(dtype)


ARITHMETIC = {*IN_PLACE, *IN_PLACE.values(), *COMPARISONS, *_UNARY, *_EXTREMES, of_number}
#: what stands between steps
ARITHMETIC |= {"__abs__", "clone", "to"}
_WIDE = {torch.float64, torch.complex128}


def make_exact(
    body: fx.GraphModule, n_carry: int, numbers: Collection[int], exact_inputs: Collection[int]
) -> tuple[dict[int, torch.dtype], str | None]:
    """Let ``body``, and the graphs that it calls, compute with all digits what they make of the
    inputs ``numbers`` alone.

    ``exact_inputs`` says of which of them all digits are at hand. Returns those that are double
    from here on, with the dtypes that they had, and what :func:`add_conditions` returns.
    """
    graph = body.graph
    placeholders = graph.find_nodes(op="placeholder")
    exact = _Exact(body)
    for k in numbers:
        is_complex = placeholders[k].meta["example_value"].is_complex()
        exact.know(placeholders[k], is_wide=k in exact_inputs and not is_complex)
    exact.visit_all()
    widened = {k: exact.narrow[p] for k, p in enumerate(placeholders) if p in exact.narrow}
    output: Any = output_node(graph)
    results = list(output.args[0])
    for k, result in enumerate(results):
        is_carried = k in numbers and k < n_carry
        if is_carried and _dtype_of(placeholders[k]) == torch.float64:
            results[k] = exact.cast(result, torch.float64)
        elif result in exact.narrow:
            results[k] = exact.cast(result, exact.narrow[result])
        elif k >= n_carry and result in exact.numbers and _dtype_of(result) == torch.float64:
            results[k] = exact.cast(result, torch.get_default_dtype())
    output.args = (tuple(results),)
    return widened, add_conditions(graph, n_carry, exact.numbers)


class _Exact:
    def __init__(self, module: fx.GraphModule) -> None:
        self.module, self.graph = module, module.graph
        #: with the examples that they had, by which a graph that a node calls knows them, too
        self.numbers: dict[fx.Node, Any] = {}
        #: nodes that are double now, with the dtypes that they had
        self.narrow: dict[fx.Node, torch.dtype] = {}
        #: nodes, and the numbers that the graphs that they call take in double
        self._taken_wide: set[tuple[fx.Node, fx.Node]] = set()
        self._casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}

    def know(self, number: fx.Node, is_wide: bool) -> None:
        self.numbers[number] = number.meta["example_value"]
        if is_wide:
            self.widen(number)

    def visit_all(self) -> None:
        for node in list(self.graph.nodes):
            self._visit(node)
        self._round_for_tensors()

    def _visit(self, node: fx.Node) -> None:
        given = [n for n in node.all_input_nodes if not is_symbol(n)]
        if node.target in ARITHMETIC and given and self.numbers.keys() >= set(given):
            self.know(node, is_wide=False)
            self._add_as_integers(node)
            if self.widen(node):
                for number in given:
                    node.replace_input_with(number, self.cast(number, _wide(_dtype_of(number))))
                self._divide_once(node)
        elif node.target is value_of:
            self.know(node, is_wide=True)
            node.args = (node.args[0], _dtype_of(node))
        elif node.target is of_number:
            raise Unsupported(f"{NUMBER_OF_TENSOR}{users_line(node.stack_trace or '')}")
        elif node.op != "placeholder" and NUMBER in node.meta:  # what a scan in the body counts
            self.know(node, is_wide=False)
        elif node.target is not scan_op:  # whose body is exact already
            self._visit_graphs(node)

    def _visit_graphs(self, node: fx.Node) -> None:
        """Compute with all digits in the graphs that ``node`` calls: those of a custom function, of
        a checkpoint, of branches."""
        given = node.all_input_nodes
        read = [getattr(self.module, str(n.target), None) for n in given if n.op == "get_attr"]
        graphs = [value for value in read if isinstance(value, fx.GraphModule)]
        inputs = [_by_example(graph.graph.find_nodes(op="placeholder")) for graph in graphs]
        known = {id(self.numbers[n]): n in self.narrow for n in given if n in self.numbers}
        taken = [
            n for n in given if n in self.narrow and any(id(self.numbers[n]) in i for i in inputs)
        ]
        self._taken_wide.update((node, n) for n in taken)
        for k, module in enumerate(graphs):
            exact = _Exact(module)
            for example in inputs[k].keys() & known.keys():
                for placeholder in inputs[k][example]:
                    exact.know(placeholder, is_wide=known[example])
            exact.visit_all()
            # what a function saves for its backward is a number there, too
            known |= exact.return_numbers({*itertools.chain(*inputs[k + 1 :])})
            module.recompile()

    def return_numbers(self, wide: Collection[int]) -> dict[int, bool]:
        """Round what the graph returns, except numbers whose examples are in ``wide``; return the
        examples of all numbers that it returns, and which are double."""
        known = {}

        def rounded(node: fx.Node) -> fx.Node:
            is_wide = node in self.narrow and id(self.numbers[node]) in wide
            if node in self.numbers:
                known[id(self.numbers[node])] = is_wide
            return (
                node if is_wide or node not in self.narrow else self.cast(node, self.narrow[node])
            )

        output = output_node(self.graph)
        output.args = fx.map_arg(output.args, rounded)
        return known

    def _add_as_integers(self, node: fx.Node) -> None:
        """Let True + True be 2, as of numbers; of tensors it is True."""
        if node.target is operator.add and _dtype_of(node) == torch.bool:
            for flag in node.all_input_nodes:
                node.replace_input_with(flag, self.cast(flag, torch.int64))
            node.meta["example_value"] = node.meta["example_value"].to(torch.int64)

    def _divide_once(self, node: fx.Node) -> None:
        """Let ``0.1 / n`` divide; torch multiplies a Python number by the reciprocal of a tensor,
        which rounds twice."""
        if node.target is operator.truediv and isinstance(node.args[0], (int, float)):
            with self.graph.inserting_before(node):
                options = {"dtype": torch.float64, "device": node.meta["example_value"].device}
                dividend = self.graph.call_function(torch.full, ((), node.args[0]), options)
            dividend.meta["example_value"] = node.meta["example_value"]
            self.know(dividend, is_wide=False)
            node.args = (dividend, *node.args[1:])

    def widen(self, node: fx.Node) -> bool:
        """Make the example of ``node`` double, if it has a smaller floating or complex dtype."""
        dtype = _dtype_of(node)
        if dtype is None or dtype in _WIDE or not (dtype.is_floating_point or dtype.is_complex):
            return False
        self.narrow[node] = dtype
        node.meta["example_value"] = node.meta["example_value"].to(_wide(dtype))
        return True

    def _round_for_tensors(self) -> None:
        for node, dtype in self.narrow.items():
            for user in list(node.users):
                is_cast = user in self._casts.values()
                if user.op != "output" and not is_cast and user not in self.numbers:
                    if (user, node) not in self._taken_wide and not self._computes_in_double(user):
                        user.replace_input_with(node, self.cast(node, dtype))

    def _computes_in_double(self, node: fx.Node) -> bool:
        """Return True if ``node`` computes in double precision; a comparison does so if it
        compares with what is double, a function of the user's if all its results are double."""
        if node.target in COMPARISONS:
            others = (n for n in node.all_input_nodes if n not in self.narrow)
            return any(_dtype_of(n) in _WIDE for n in others)
        results = tree.leaves(node.meta.get("example_value"))
        dtypes = {v.dtype for v in results if isinstance(v, torch.Tensor)}
        floating = {d for d in dtypes if d.is_floating_point or d.is_complex}
        return bool(floating) and floating <= _WIDE

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        if _dtype_of(node) == dtype:
            return node
        if (node, dtype) not in self._casts:
            last = node if node.op != "placeholder" else self._last_placeholder()
            with self.graph.inserting_after(last):
                made = self.graph.call_method("to", (node, dtype))
            made.meta["example_value"] = node.meta["example_value"].to(dtype)
            self._casts[node, dtype] = made
        return self._casts[node, dtype]

    def _last_placeholder(self) -> fx.Node:
        return self.graph.find_nodes(op="placeholder")[-1]


def is_symbol(node: fx.Node) -> bool:
    """Return True for a Python number of the program's that Dynamo does not take for a constant."""
    return isinstance(node.meta.get("example_value"), SYMBOLS)


def _by_example(nodes: Iterable[fx.Node]) -> dict[int, list[fx.Node]]:
    """Return the nodes by the identity of their examples, which Dynamo gives to what it passes."""
    found: dict[int, list[fx.Node]] = {}
    for node in nodes:
        found.setdefault(id(node.meta.get("example_value")), []).append(node)
    return found


def _wide(dtype: torch.dtype | None) -> torch.dtype:
    return torch.complex128 if dtype is not None and dtype.is_complex else torch.float64


def _dtype_of(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("example_value")
    return value.dtype if isinstance(value, torch.Tensor) else None
