"""Dynamo's variable trackers and eager capture (checked on torch 2.9.1, 2.13.0, 2.15.0).

Imported on first use of Dynamo only (see ``dynamo_loading``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._C._functorch import peek_interpreter_stack
from torch._dynamo import bytecode_transformation
from torch._dynamo import config as dynamo_config
from torch._dynamo.backends.debugging import make_eager_backend_with_torch_function_modes
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    TorchDynamoException,
    UncapturedHigherOrderOpError,
    Unsupported,
    UserError,
    UserErrorType,
)
from torch._dynamo.utils import guard_failures
from torch._dynamo.variables import higher_order_ops as _hops
from torch._dynamo.variables.base import (
    AttributeMutationExisting,
    AttributeMutationNew,
    VariableTracker,
)
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.higher_order_ops import (
    TorchHigherOrderOperatorVariable,
    discard_graph_changes,
    make_attr,
    speculate_subgraph,
)
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import ListVariable
from torch._dynamo.variables.misc import AutogradFunctionVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._inductor.exc import InductorError
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.meta_utils import MetaTensorDescriber
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import (
    PreDispatchTorchFunctionMode,
    TorchFunctionMetadataMode,
)
from torch.overrides import _len_torch_function_stack, _pop_mode, _push_mode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from torch_scan_hop._torch.side_effects import lasting_changes_are_refused
from torch_scan_hop.errors import CUSTOM_FUNCTION_UNDER_TRANSFORM

__all__ = [
    "DYNAMO_ERRORS",
    "ConstantVariable",
    "LazyVariableTracker",
    "TorchHigherOrderOperatorVariable",
    "Unsupported",
    "VariableTracker",
    "call_inlined",
    "capture_graph",
    "compile_for_capture",
    "compilers_error",
    "create_node",
    "create_proxy",
    "discard_graph_changes",
    "example_value",
    "graph_being_traced",
    "install_body",
    "is_data_dependent",
    "is_limit_hit",
    "known_modules",
    "make_attr",
    "make_traceable",
    "not_fx_tracing",
    "reconstruct_outputs",
    "sequence_items",
    "speculate",
    "users_error",
]

DYNAMO_ERRORS: tuple[type[BaseException], ...] = (
    TorchDynamoException,
    UncapturedHigherOrderOpError,
    Unsupported,
    FailOnRecompileLimitHit,
)


def is_data_dependent(error: BaseException) -> bool:
    """Whether Dynamo gave up since Python wants to know the value of a tensor."""
    first_line = str(error).strip().split("\n", 1)[0].lower()
    words = r"data.dependent|dynamic shape|\.item\(\)|\.tolist\(\)"
    return re.search(words, first_line) is not None


def compilers_error(error: BaseException) -> BaseException | None:
    """What the backend or its toolchain raised, if that is why ``error`` came."""
    if isinstance(error, (BackendCompilerFailed, InductorError)):
        return getattr(error, "inner_exception", error)
    return None


@functools.cache
def _as_users_error(kind: type[Exception]) -> type[UserError]:
    bases: tuple[Any, ...] = (UserError, kind)
    made: Any = type(kind.__name__, bases, {"__module__": kind.__module__})
    return made


def users_error(kind: type[Exception], message: str) -> UserError:
    """A ``kind`` that Dynamo passes on as it is, with the user's lines below its message."""
    made = _as_users_error(kind)  # type: ignore[arg-type]
    return made(UserErrorType.INVALID_INPUT, message)


def sequence_items(tx: Any, variable: VariableTracker) -> list[VariableTracker]:
    unpack = getattr(_hops, "unpack_iterable", None)
    if unpack is not None:
        return list(unpack(tx, variable))
    return list(variable.unpack_var_sequence(tx))


def call_inlined(tx: Any, fn: Callable[..., Any], *args: VariableTracker) -> VariableTracker:
    return _hops._make_inlined(tx, fn)(*args)


def example_value(variable_or_node: Any) -> Any:
    node = variable_or_node
    if isinstance(node, VariableTracker):
        node = node.as_proxy().node
    elif isinstance(node, fx.Proxy):
        node = node.node
    return node.meta.get("example_value")


def speculate(
    tx: Any, fn: VariableTracker, args: list[VariableTracker], op: Any
) -> tuple[Any, Any, fx.Graph, dict[fx.Proxy, fx.Proxy]]:
    """Trace ``fn(*args)`` to a graph of its own, closures lifted to placeholders at the end.

    Returns (flat results, their spec, graph, outer proxy -> placeholder of each closure).
    """
    config: Any = dynamo_config
    before = tx.output.side_effects.clone()
    with (
        lasting_changes_are_refused(tx),
        _custom_functions_are_nodes(),
        # a body may read the weights of an nn.LSTM; Dynamo breaks the graph at its mention
        config.patch(allow_rnn=True),
    ):
        (result, spec), graph, lifted = speculate_subgraph(
            tx,
            fn,
            args,
            {},
            "torch.ops.higher_order.scan",
            source_target=op,
            set_subgraph_inputs="flatten_manual",
            should_flatten_outputs=True,
            restore_side_effects=False,
            supports_input_mutation=True,
            supports_aliasing=True,
            **_ALIASED_INPUTS,
        )
    _keep_new_objects(before, tx.output.side_effects)
    tx.output.side_effects = before
    return result, spec, graph, lifted


@contextlib.contextmanager
def _custom_functions_are_nodes() -> Iterator[None]:
    """A custom ``autograd.Function`` is captured with its backward.

    Dynamo inlines its forward if no argument requires grad; but a carry may from the second
    step on, and a functorch level may want its derivative.
    """
    original = AutogradFunctionVariable.call_apply

    def call_apply(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if peek_interpreter_stack() is not None:
            raise Unsupported(CUSTOM_FUNCTION_UNDER_TRANSFORM)
        args = [_as_requiring_grad(a.realize()) for a in args]
        return original(self, tx, args, kwargs)

    AutogradFunctionVariable.call_apply = call_apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        AutogradFunctionVariable.call_apply = original  # type: ignore[method-assign]


def _as_requiring_grad(variable: VariableTracker) -> VariableTracker:
    value = example_value(variable) if isinstance(variable, TensorVariable) else None
    if value is None or not (value.is_floating_point() or value.is_complex()):
        return variable
    return variable.clone(requires_grad=True)


def _keep_new_objects(before: Any, after: Any) -> None:
    """Add to ``before`` what Dynamo must know ``after`` a body was traced.

    What a body assigns to attributes is forgotten (``module.steps += 1`` assigns what was
    there), as Dynamo does for its own operators; but not the objects that the body made, or it
    could return no dataclass.
    """
    before.track_runahead_tensor_and_symvar_side_effects(after)
    for name in ("store_attr_mutations", "attr_mutation_kinds"):  # the second since 2.13
        known = getattr(before, name, {})
        for variable, attributes in getattr(after, name, {}).items():
            if not isinstance(variable.mutation_type, AttributeMutationExisting):
                known.setdefault(variable, attributes)
    for value in after.keepalive:
        variable = after.id_to_variable[id(value)]
        if id(value) not in before.id_to_variable and isinstance(
            variable.mutation_type, AttributeMutationNew
        ):
            before.id_to_variable[id(value)] = variable
            before.keepalive.append(value)


_ALIASED_INPUTS: dict[str, Any] = (
    {"supports_input_input_aliasing": True}
    if "supports_input_input_aliasing" in speculate_subgraph.__code__.co_varnames
    else {}
)


def make_traceable(fn: VariableTracker) -> None:
    """A GraphModule whose code is still to be generated cannot be traced into."""
    module = getattr(fn, "value", None)
    if isinstance(module, fx.GraphModule):
        _LazyGraphModule.force_recompile(module)


def create_node(
    tx: Any, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> VariableTracker:
    """Emit a node into the graph being captured and track its result."""
    return wrap_fx_proxy(tx=tx, proxy=tx.output.create_proxy(kind, target, args, kwargs))


def graph_being_traced(tx: Any) -> fx.Graph:
    """The graph at hand: of the program, or of the body that is being captured within it."""
    return tx.output.current_tracer.graph


def create_proxy(tx: Any, kind: str, target: Any, args: tuple[Any, ...]) -> fx.Proxy:
    """A node of the graph at hand, of whose result nothing is known yet."""
    return tx.output.create_proxy(kind, target, args, {})


def install_body(tx: Any, name: str, module: fx.GraphModule) -> str:
    """The name, like ``name``, that ``module`` has among the modules of the graph at hand."""
    return str(tx.output.install_subgraph(name, module))


def known_modules(tx: Any) -> dict[str, Any]:
    """What graphs of this capture may refer to by name."""
    return dict(tx.output.nn_modules)


def reconstruct_outputs(tx: Any, items: list[VariableTracker], spec: Any) -> VariableTracker:
    """The pytree that the traced function returned, with ``items`` as its tensor leaves."""
    flat: VariableTracker = ListVariable(items)
    if spec.masks_to_filter_const_values:
        from torch._dynamo.external_utils import insert_const_values_with_mask

        flat = _hops._make_inlined(tx, insert_const_values_with_mask)(
            flat, spec.masks_to_filter_const_values, spec.const_values
        )
        flat = ListVariable(sequence_items(tx, flat))
    return _hops._make_inlined(tx, pytree.tree_unflatten)(flat, spec.treespec)


@contextlib.contextmanager
def not_fx_tracing() -> Iterator[None]:
    """Dynamo refuses to start inside an FX trace; make_fx's own tracing is no obstacle."""
    symbolic_trace = torch.fx._symbolic_trace
    if hasattr(symbolic_trace, "_set_is_fx_tracing"):
        before = symbolic_trace._get_is_fx_tracing()  # type: ignore[attr-defined]
        symbolic_trace._set_is_fx_tracing(False)
        try:
            yield
        finally:
            symbolic_trace._set_is_fx_tracing(before)
        return
    before = symbolic_trace._is_fx_tracing_flag
    symbolic_trace._is_fx_tracing_flag = False
    try:
        yield
    finally:
        symbolic_trace._is_fx_tracing_flag = before


def is_limit_hit(error: BaseException) -> bool:
    """Whether Dynamo has as many captures of one function as it keeps."""
    return isinstance(error, FailOnRecompileLimitHit)


# What Dynamo says where the calling thread traces with FX; until torch 2.14 also if another does,
# for which there is the lock.
_NESTED_TRACE = "using FX to symbolically trace"

# captures in a row without a call that found its own among those there are
MANY_CAPTURES = 8


def compile_for_capture(
    fn: types.FunctionType,
    dynamic: bool | None,
    not_traced: type[Exception],
    report: Callable[[int, str], None],
    backend: str = "eager",
) -> Callable[..., Any]:
    """``fn`` captured by Dynamo, and run as captured or compiled by ``backend``.

    Torch's own "eager" runs it as captured, and is the only one that Dynamo accepts under
    functorch transforms. ``not_traced`` is what ``fn`` raises when it runs without Dynamo.
    ``report(count, guard)`` is called when ``count`` calls in a row needed a capture each. The
    result's ``history`` has for each capture the guard that called for it.
    """
    misses = 0
    history: list[str] = []
    run_known = torch._dynamo.run(fn)  # what is captured already; else it just calls fn
    with _hop_capture():  # or torch.compile would do nothing in an export, now and later
        compiled = torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)

    def run(*args: Any) -> Any:
        nonlocal misses
        known = _len_torch_function_stack() == 0
        if known:
            try:
                result = run_known(*args)
            except not_traced:
                pass
            except RuntimeError as error:
                if _NESTED_TRACE not in str(error):
                    raise
            else:
                misses = 0
                return result
        # one thread at a time: tracers patch torch's modules, and guards look at those
        waited = not compile_lock.acquire(blocking=False)
        if waited:
            compile_lock.acquire()
        try:
            if waited and known:
                with contextlib.suppress(not_traced):
                    return run_known(*args)  # another thread has captured it
            n_failures = len(guard_failures.get(fn.__code__, ()))
            result = capture(*args)
            guard = _guard_that_failed(fn, n_failures)
            if guard or not history:
                history.append(guard)
        finally:
            compile_lock.release()
        misses += 1
        if misses == MANY_CAPTURES:
            report(misses, _last_guard_that_failed(fn))
        return result

    def capture(*args: Any) -> Any:
        with (
            _no_code_is_kept(),
            not_fx_tracing(),
            _hop_capture(),
            _more_captures(),
            _functorch_views(),
            _parameters_of_symbolic_size(),
        ):
            if _len_torch_function_stack() == 0:
                return compiled(*args)
            with _without_tracer_modes() as modes:
                if not modes or peek_interpreter_stack() is not None:
                    return compiled(*args)
                with_modes = make_eager_backend_with_torch_function_modes(modes)
                again = torch.compile(fn, backend=with_modes, fullgraph=True, dynamic=dynamic)
                return again(*args)

    run.history = history  # type: ignore[attr-defined]
    return run


@contextlib.contextmanager
def _no_code_is_kept() -> Iterator[None]:
    """Dynamo keeps the last 128 code objects it read, and what is captured lives as its code does.

    A notebook's cell that is defined again would leave all that was captured of it behind.
    """
    try:
        yield
    finally:
        cached = getattr(bytecode_transformation, "_cached_cleaned_instructions", None)
        if cached is not None:
            cached.cache_clear()


def _last_guard_that_failed(fn: types.FunctionType) -> str:
    """The condition alone: comments and the user's stack come behind it, captures' numbers before.

    torch 2.9 has the conditions that failed on lines of their own, of which the last counts.
    """
    failures = guard_failures.get(fn.__code__) or ["an unknown guard"]
    lines = str(failures[-1]).strip().partition("\nUser stack trace:")[0].splitlines()
    return re.sub(r"^\d+/\d+: ", "", lines[-1]).partition("  # ")[0].strip()


def _guard_that_failed(fn: types.FunctionType, position: int) -> str:
    """The first that failed since there were ``position`` of them: that of the last capture."""
    failures = guard_failures.get(fn.__code__, [])[position:]
    return str(failures[0]).strip() if failures else ""


@contextlib.contextmanager
def _parameters_of_symbolic_size() -> Iterator[None]:
    """Dynamo counts the bytes of the parameters that it guards; make_fx's may have no number."""
    if torch._C._len_torch_dispatch_stack() == 0:
        yield
        return
    FakeTensor.nbytes = property(lambda self: self.numel() * self.element_size())  # type: ignore[assignment]
    try:
        yield
    finally:
        del FakeTensor.nbytes


@contextlib.contextmanager
def _functorch_views() -> Iterator[None]:
    """Let Dynamo make fakes of functorch wrappers that are views, or results of operators.

    Every dual tensor is a view, and ``grad`` of a function that computes ``init`` gives no leaf.
    Dynamo's fakes of wrappers are neither, and it asserts that they are what they stand for; a
    body that captures them reads them, and what it may do with them does not depend on that.
    """
    if peek_interpreter_stack() is None:
        yield
        return
    original = MetaTensorDescriber.describe_tensor

    def describe(self: Any, t: torch.Tensor, **kwargs: Any) -> Any:
        description = original(self, t, **kwargs)
        if description.is_functorch_wrapped:
            description = dataclasses.replace(description, is_view=False, is_leaf=True)
        return description

    MetaTensorDescriber.describe_tensor = describe  # type: ignore[method-assign]
    try:
        yield
    finally:
        MetaTensorDescriber.describe_tensor = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _without_tracer_modes() -> Iterator[list[Any]]:
    """make_fx's own torch-function modes count calls, which no guard can hold.

    There are those of several when one traces in another, as ``torch.func.linearize`` does.
    """
    stack = [_pop_mode() for _ in range(_len_torch_function_stack())][::-1]
    tracers = [m for m in stack if isinstance(m, _TRACER_MODES)]
    users = [m for m in stack if not isinstance(m, _TRACER_MODES)]
    for mode in users:
        _push_mode(mode)
    try:
        yield tracers
    finally:
        for _ in users:
            _pop_mode()
        for mode in stack:
            _push_mode(mode)


_TRACER_MODES = (PreDispatchTorchFunctionMode, TorchFunctionMetadataMode)


# a body may be called with many closures, shapes and functorch stacks
CAPTURES_PER_FUNCTION = 64


@contextlib.contextmanager
def _more_captures() -> Iterator[None]:
    config: Any = dynamo_config
    wanted = {
        "recompile_limit": max(config.recompile_limit, CAPTURES_PER_FUNCTION),
        # torch_xla's Dynamo bridge turns these the other way for the whole process
        "automatic_dynamic_shapes": True,
        "specialize_float": False,
    }
    before = {name: getattr(config, name) for name in wanted}
    for name, value in wanted.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


_utils = torch._higher_order_ops.utils
_setup = getattr(_utils, "setup_compilation_env", None)


@contextlib.contextmanager
def _hop_capture() -> Iterator[None]:
    """torch >= 2.13 wants to know that this compile belongs to a higher-order operator."""
    tls = getattr(_utils, "_hop_compile_tls", None)
    if tls is None:
        yield
        return
    before = getattr(tls, "in_hop_compile", False)
    tls.in_hop_compile = True
    try:
        yield
    finally:
        tls.in_hop_compile = before


def capture_graph(
    fn: Callable[..., Any], args: Any, closure: tuple[str, ...] | None = None
) -> tuple[fx.GraphModule, list[Any], list[str], list[Any], Any]:
    """The torch-level graph of ``fn(*args)``; nothing of it is run.

    Returns (graph, the value that stands for each placeholder, its name, for each leaf of the
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
        outputs = [torch.empty(v.shape, dtype=v.dtype, device="meta") for v in likes]
        found.extend([list(values), outputs])
        return outputs

    with compile_lock, fresh_code(fn) as copy, _without_dispatch_modes(), _no_code_is_kept():
        result = torch.compile(copy, backend=backend, fullgraph=True, dynamic=False)(*args)
    gm, values, outputs = found
    found.clear()
    if closure is None:
        closure = getattr(getattr(fn, "__code__", None), "co_freevars", ())
    names = [_source_name(closure, n) for n in gm.graph.find_nodes(op="placeholder")]
    leaves, spec = pytree.tree_flatten(result)
    position = {id(v): k for k, v in enumerate(outputs)}
    return gm, values, names, [position.get(id(leaf), leaf) for leaf in leaves], spec


_MODE_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)


@contextlib.contextmanager
def _without_dispatch_modes() -> Iterator[None]:
    """Dynamo does not start under a user's dispatch mode; torch 2.9 remembers one in flags."""
    flags = vars(_python_dispatch)
    before = {name: flags[name] for name in _MODE_FLAGS if name in flags}
    with _disable_current_modes():
        try:
            for name in before:
                setattr(_python_dispatch, name, False)
            yield
        finally:
            for name, value in before.items():
                setattr(_python_dispatch, name, value)


@contextlib.contextmanager
def fresh_code(fn: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """``fn`` with nothing of it in Dynamo's cache, so that the backend is called."""
    if isinstance(fn, types.FunctionType):
        copy = types.FunctionType(
            fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
        )
        copy.__kwdefaults__ = fn.__kwdefaults__
        yield copy
    else:
        yield lambda *args: fn(*args)


def _source_name(names: tuple[str, ...], placeholder: fx.Node) -> str:
    """The name of a captured variable in the user's code."""
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
