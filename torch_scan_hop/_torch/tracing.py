"""FX traces that nothing of the caller leaks into (checked on torch 2.9.1, 2.13.0, 2.15.0).

The operator's kernels run in the middle of other people's traces: under AOTAutograd's
functional, proxy and fake modes, under functorch interpreters, under a user's own
``TorchDispatchMode``. Bodies are traced on fake tensors only, with all of those set aside.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._higher_order_ops import effects
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.traceback import preserve_node_meta

from torch_scan_hop import legality
from torch_scan_hop._torch.dtensors import shards_of
from torch_scan_hop._torch.impure import erase_unread
from torch_scan_hop._torch.isolation import isolated
from torch_scan_hop._torch.operators import past_module_hooks
from torch_scan_hop._torch.replaced import ambient, replaced, wrap

# the errors of fakes if a value is read, or decides a shape
DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)


def is_traced(tensors: Sequence[Any]) -> bool:
    """Return True if a proxy trace or a functionalization pass is watching these tensors."""
    return get_proxy_mode() is not None or is_functionalized(tensors)


def is_exporting_to_onnx() -> bool:
    # to ask imports the exporter, which whoever exports has imported
    return "torch.onnx._internal.exporter" in sys.modules and torch.onnx.is_in_onnx_export()


def is_functionalized(tensors: Sequence[Any]) -> bool:
    """Return True if AOTAutograd traces these tensors."""
    for shard in shards_of(tensors):
        if isinstance(shard, FunctionalTensor):
            return True
    return False


def _wrap(tensor: Any) -> Any:
    return FunctionalTensor.to_functional(tensor) if isinstance(tensor, torch.Tensor) else tensor


def unwrap_functional(value: Any) -> Any:
    if not isinstance(value, FunctionalTensor):
        return value
    torch._sync(value)
    return torch._from_functional_tensor(value.elem)


def _functionalized(fn: Callable[..., Any], mutated: set[int] | None = None) -> Callable[..., Any]:
    """Return ``fn`` with in-place operations turned into functional ones, under autograd."""
    from torch._functorch._aot_autograd.functional_utils import has_data_mutation

    def wrapper(*args: Any) -> Any:
        with FunctionalTensorMode():
            functional = [_wrap(a) for a in args]
            out = without_tokens(past_module_hooks(fn))(*functional)
            if mutated is not None:
                mutated.update(
                    k
                    for k, a in enumerate(functional)
                    if isinstance(a, FunctionalTensor) and has_data_mutation(a)
                )
            return pytree.tree_map(unwrap_functional, out)

    return wrapper


_state = ambient(tracing_a_body=False, without_tokens=False, lstm_in_parts=False)


def is_tracing_a_body() -> bool:
    """Return True if the trace under way is :func:`trace`, not AOTAutograd's or the caller's."""
    return _state.tracing_a_body  # type: ignore[no-any-return]


# Operators that torch >= 2.13 wants ordered by tokens, and whose order in a body is the graph's.
_UNORDERED = {torch.ops.aten._linalg_check_errors.default}


def _let_bodies_have_no_tokens() -> None:
    """Let functionalization give such operators no tokens within :func:`without_tokens`."""

    def outside_bodies(has_effects: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        is_unordered = op in _UNORDERED and _state.without_tokens
        return not is_unordered and bool(has_effects(op, *args, **kwargs))

    if hasattr(effects, "has_effects"):
        wrap(effects, has_effects=outside_bodies)


_let_bodies_have_no_tokens()


def _let_bodies_have_lstm_in_parts() -> None:
    """Let :func:`lstm_in_parts` write ``lstm`` out, as torch does for an input with a gradient.

    Otherwise torch's trace takes oneDNN's operator, which it has for inference alone: it has no
    derivative, and its fake has a workspace that its kernel does not have.
    """
    decompositions = getattr(torch._decomp, "decompositions", None)
    one_layer = getattr(decompositions, "one_layer_lstm", None)
    if one_layer is None or not hasattr(decompositions, "select_one_layer_lstm_function"):
        return  # then a body with an LSTM is a loop

    def in_parts(input: Any, hidden: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        output, state = one_layer(input, hidden, *args, **kwargs)
        # torch 2.9 leaves a dimension in the state
        return output, tuple(s.reshape(h.shape) for s, h in zip(state, hidden, strict=True))

    def chosen(choose: Any, *args: Any, **kwargs: Any) -> Any:
        return in_parts if _state.lstm_in_parts else choose(*args, **kwargs)

    wrap(decompositions, select_one_layer_lstm_function=chosen)


_let_bodies_have_lstm_in_parts()


def _let_fused_cells_have_no_biases() -> None:
    """Mend the fake of the LSTM cell of a GPU: it asks on which device a bias is that is not there.

    Torch 2.15 has it right, and there nothing changes.
    """
    registrations = sys.modules.get("torch._meta_registrations")
    if not hasattr(registrations, "rnn_cell_checkSizes"):
        return  # then a body with such a cell is a loop

    def checked(check: Any, gates: Any, hidden: Any, bias: Any, other: Any, *rest: Any) -> None:
        if bias is None and other is None and gates.ndim == 2:
            bias = other = gates.new_empty(gates.shape[1])
        check(gates, hidden, bias, other, *rest)

    wrap(registrations, rnn_cell_checkSizes=checked)


_let_fused_cells_have_no_biases()


def lstm_in_parts() -> contextlib.AbstractContextManager[None]:
    return replaced(_state, lstm_in_parts=True)


def without_tokens(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``body`` made to take and return no tokens in a functionalized trace."""

    def run(*args: Any) -> Any:
        with replaced(_state, without_tokens=True):
            return body(*args)

    return run


def trace(fn: Callable[..., Any], examples: Sequence[Any], mode: FakeTensorMode) -> fx.GraphModule:
    """Return the functional ATen graph of ``fn(*examples)``; ``examples`` are fakes of ``mode``.

    A backward in ``fn`` runs in this thread. Autograd has threads of its own for a GPU's nodes:
    they have none of the modes that trace, and would wait for the lock that this thread holds.
    """
    with (
        _one_thread_at_a_time(),
        torch.autograd.set_multithreading_enabled(False),
        isolated(),
        mode,
        enable_python_dispatcher(),
        preserve_node_meta(),
        replaced(_state, tracing_a_body=True, lstm_in_parts=True),
    ):
        graph_module = make_fx(_functionalized(fn), tracing_mode="real")(*examples)
    erase_unread(graph_module.graph)
    for node in graph_module.graph.nodes:
        node.meta.setdefault("val", None)  # as of a check, which returns nothing
    return as_traced(legality.checked("trace", graph_module))


_lock = threading.RLock()


def _one_thread_at_a_time() -> Any:
    """Take Dynamo's lock: make_fx patches modules for all threads, and Dynamo may call a trace."""
    convert_frame: Any = sys.modules.get("torch._dynamo.convert_frame")
    return _lock if convert_frame is None else convert_frame.compile_lock


_TRACED = "torch_scan_hop.traced"


def as_traced(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Mark a graph as made by :func:`trace`, or from such graphs alone."""
    graph_module.meta[_TRACED] = True
    return graph_module


def needs_no_trace(body: Any) -> bool:
    """Return True if tracing ``body`` again would give ``body``, because it was traced here before.

    Without this, every level of nested scans would trace again all that is inside it.
    """
    return is_tracing_a_body() and isinstance(body, fx.GraphModule) and _TRACED in body.meta


def mutated_inputs(
    fn: Callable[..., Any], examples: Sequence[Any], mode: FakeTensorMode
) -> set[int]:
    """Return the positions of the tensors among ``examples`` whose data ``fn`` changes in place."""
    mutated: set[int] = set()
    with isolated(), mode, enable_python_dispatcher(), torch.no_grad():
        _functionalized(fn, mutated)(*examples)
    return mutated


def run_fake(fn: Callable[..., Any], examples: Sequence[Any], mode: FakeTensorMode) -> Any:
    """Evaluate ``fn`` for its output metadata only."""
    with isolated(), mode, enable_python_dispatcher(), lstm_in_parts():
        return past_module_hooks(fn)(*examples)


@contextlib.contextmanager
def replaying(mode: FakeTensorMode) -> Iterator[None]:
    """Run operators on fakes of ``mode`` for their results: nothing is traced, no guard is made."""
    env = mode.shape_env
    quiet = contextlib.nullcontext() if env is None else env.suppress_guards()
    with isolated(), mode, enable_python_dispatcher(), torch.no_grad(), quiet:
        yield
