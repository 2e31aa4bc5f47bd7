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
from torch._dispatch.python import enable_python_dispatcher, suspend_functionalization
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import detect_fake_mode
from torch._higher_order_ops import effects
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import (
    FunctionalTensor,
    FunctionalTensorMode,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
)
from torch.fx.traceback import preserve_node_meta
from torch.utils._python_dispatch import _disable_current_modes

from torch_scan_hop import legality
from torch_scan_hop._torch.transforms import put_back_on_error

__all__ = [
    "DATA_DEPENDENT_ERRORS",
    "FakeTensor",
    "FakeTensorMode",
    "are_all_known_equal",
    "are_known_equal",
    "detect_fake_mode",
    "fake_like_number",
    "fake_mode_of",
    "fake_tensor",
    "is_functionalized",
    "is_traced",
    "is_tracing_a_body",
    "isolated",
    "likely_value",
    "mutated_inputs",
    "plain_fake",
    "replaying",
    "run_fake",
    "statically_known_true",
    "trace",
    "without_tokens",
]

# what fakes raise where a value is read, or decides a shape
DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)


def is_traced(tensors: Sequence[Any]) -> bool:
    """Whether a proxy trace or a functionalization pass is watching these tensors."""
    return get_proxy_mode() is not None or is_functionalized(tensors)


def is_functionalized(tensors: Sequence[Any]) -> bool:
    """Whether AOTAutograd traces these tensors."""
    return any(isinstance(t, FunctionalTensor) for t in tensors)


def statically_known_true(condition: Any) -> bool:
    """Whether ``condition`` holds as far as that is known; Dynamo traces this."""
    # imported here, as below: it imports sympy, which takes longer than all of this package
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition))


def are_known_equal(size: Any, other: Any) -> bool:
    """Whether two sizes are equal as far as that is known: no guard is made, nothing is traced."""
    if isinstance(size, int) and isinstance(other, int):
        return size == other
    # to a trace under way a comparison of symbols is an operator
    with disable_proxy_modes_tracing():
        return statically_known_true(size == other)


def are_all_known_equal(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    """The same of two shapes, or of the strides of two tensors."""
    return len(sizes) == len(others) and all(map(are_known_equal, sizes, others))


def likely_value(size: Any) -> int:
    """What a size was when it was traced, without a guard on it; 1 where that is not known."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    hint = size.node.hint
    return 1 if hint is None else int(hint)


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Set aside every dispatch mode, functorch level and functionalization pass."""
    with (
        temporarily_clear_interpreter_stack(),
        suspend_functionalization(),
        _disable_current_modes(),
        # a user's hooks (offloading) are for real residuals, not for a trace's fakes
        _without_saved_tensors_hooks(),
        # its checks read values, and fakes have none
        torch.autograd.set_detect_anomaly(False),
        # a body that raises leaves the functorch levels open that it opened
        put_back_on_error(),
    ):
        yield


def _without_saved_tensors_hooks() -> contextlib.AbstractContextManager[Any]:
    state: Any = torch._C._autograd
    # functorch's grad forbids hooks: while there are any, and from then on
    if not state._saved_tensors_hooks_is_enabled():
        return contextlib.nullcontext()
    if state._top_saved_tensors_default_hooks(True) is None:
        return contextlib.nullcontext()
    return saved_tensors_hooks(_unchanged, _unchanged)


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _underlying_fake(tensor: Any) -> FakeTensor | None:
    while True:
        if isinstance(tensor, FakeTensor):
            return tensor
        if isinstance(tensor, FunctionalTensor):
            tensor = torch._from_functional_tensor(tensor.elem)
        elif isinstance(tensor, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(
            tensor
        ):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        elif isinstance(tensor, torch.Tensor) and torch._is_functional_tensor(tensor):
            tensor = torch._from_functional_tensor(tensor)
        else:
            return None


def fake_mode_of(tensors: Sequence[Any]) -> FakeTensorMode:
    """The fake mode these tensors live in, however wrapped, or a new static one.

    A caller's mode must be reused: it owns the symbols in the tensors' shapes.
    """
    for tensor in tensors:
        fake = _underlying_fake(tensor)
        if fake is not None:
            return fake.fake_mode
    active = detect_fake_mode()
    if active is not None:
        return active
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # operators with unknown results (while_loop) want somewhere to make symbols; reading a
    # value stays an error
    symbols = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbols)


def fake_tensor(
    mode: FakeTensorMode,
    shape: Sequence[Any],
    stride: Sequence[Any] | None,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool = False,
) -> torch.Tensor:
    """A fresh fake tensor: never the caller's object, so that make_fx cannot merge two."""
    with isolated(), mode:
        if stride is None:
            out = torch.empty(tuple(shape), dtype=dtype, device=device)
        else:
            out = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=device)
        return out.requires_grad_(requires_grad)


def plain_fake(fake: FakeTensor) -> torch.Tensor:
    """A fake of the same metadata that is no lazy view (conjugated, negated)."""
    return fake_tensor(fake.fake_mode, fake.shape, fake.stride(), fake.dtype, fake.device)


def fake_like_number(fake: FakeTensor) -> torch.Tensor:
    """A fake of shape ``[]`` with the dtype and device of ``fake``."""
    return fake_tensor(fake.fake_mode, (), None, fake.dtype, fake.device)


def _wrap(tensor: Any) -> Any:
    return FunctionalTensor.to_functional(tensor) if isinstance(tensor, torch.Tensor) else tensor


def unwrap_functional(value: Any) -> Any:
    if not isinstance(value, FunctionalTensor):
        return value
    torch._sync(value)
    return torch._from_functional_tensor(value.elem)


def _functionalized(fn: Callable[..., Any], mutated: set[int] | None = None) -> Callable[..., Any]:
    """``fn`` with in-place operations turned into functional ones, under autograd."""
    from torch._functorch._aot_autograd.functional_utils import has_data_mutation

    def wrapper(*args: Any) -> Any:
        with FunctionalTensorMode():
            functional = [_wrap(a) for a in args]
            out = without_tokens(fn)(*functional)
            if mutated is not None:
                mutated.update(
                    k
                    for k, a in enumerate(functional)
                    if isinstance(a, FunctionalTensor) and has_data_mutation(a)
                )
            return pytree.tree_map(unwrap_functional, out)

    return wrapper


_state = threading.local()


@contextlib.contextmanager
def _tracing_a_body() -> Iterator[None]:
    before = is_tracing_a_body()
    _state.tracing_a_body = True
    try:
        yield
    finally:
        _state.tracing_a_body = before


def is_tracing_a_body() -> bool:
    """Whether the trace under way is :func:`trace`, not a caller's (AOTAutograd, make_fx)."""
    return getattr(_state, "tracing_a_body", False)


# Operators that torch >= 2.13 wants ordered by tokens, and whose order in a body is the graph's.
_UNORDERED = {torch.ops.aten._linalg_check_errors.default}


def _let_bodies_have_no_tokens() -> None:
    """Functionalization gives such operators tokens; within :func:`without_tokens`, it does not."""
    if not hasattr(effects, "has_effects"):
        return
    has_effects = effects.has_effects

    def outside_bodies(op: Any, *args: Any) -> bool:
        if op in _UNORDERED and getattr(_state, "without_tokens", False):
            return False
        return bool(has_effects(op, *args))

    effects.has_effects = outside_bodies  # type: ignore[assignment]


_let_bodies_have_no_tokens()


def without_tokens(body: Callable[..., Any]) -> Callable[..., Any]:
    """``body`` run as part of a trace that is functionalized: it takes and returns no tokens."""

    def run(*args: Any) -> Any:
        before = getattr(_state, "without_tokens", False)
        _state.without_tokens = True
        try:
            return body(*args)
        finally:
            _state.without_tokens = before

    return run


def trace(fn: Callable[..., Any], examples: Sequence[Any], mode: FakeTensorMode) -> fx.GraphModule:
    """The functional ATen graph of ``fn(*examples)``; ``examples`` are fakes of ``mode``."""
    with (
        _one_thread_at_a_time(),
        isolated(),
        mode,
        enable_python_dispatcher(),
        preserve_node_meta(),
        _tracing_a_body(),
    ):
        graph_module = make_fx(_functionalized(fn), tracing_mode="real")(*examples)
    graph_module.graph.eliminate_dead_code()
    return as_traced(legality.checked("trace", graph_module))


_lock = threading.RLock()


def _one_thread_at_a_time() -> Any:
    """make_fx patches modules for all threads. Dynamo's lock, since Dynamo may call a trace."""
    convert_frame: Any = sys.modules.get("torch._dynamo.convert_frame")
    return _lock if convert_frame is None else convert_frame.compile_lock


_TRACED = "torch_scan_hop.traced"


def as_traced(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Marks what :func:`trace` made, or what was made from that alone."""
    graph_module.meta[_TRACED] = True
    return graph_module


def needs_no_trace(body: Any) -> bool:
    """Whether ``body`` is what a trace of it would give: all that is traced here stays as it is.

    Otherwise every level of nested scans would trace again all that is inside it.
    """
    return is_tracing_a_body() and isinstance(body, fx.GraphModule) and _TRACED in body.meta


def mutated_inputs(
    fn: Callable[..., Any], examples: Sequence[Any], mode: FakeTensorMode
) -> set[int]:
    """Positions of the tensors among ``examples`` whose data ``fn`` changes in place."""
    mutated: set[int] = set()
    with isolated(), mode, enable_python_dispatcher(), torch.no_grad():
        _functionalized(fn, mutated)(*examples)
    return mutated


def run_fake(fn: Callable[..., Any], examples: Sequence[Any], mode: FakeTensorMode) -> Any:
    """``fn`` evaluated for its output metadata only."""
    with isolated(), mode, enable_python_dispatcher():
        return fn(*examples)


@contextlib.contextmanager
def replaying(mode: FakeTensorMode) -> Iterator[None]:
    """Operators on fakes of ``mode``, for what they give: nothing is traced, no guard is made."""
    env = mode.shape_env
    quiet = contextlib.nullcontext() if env is None else env.suppress_guards()
    with isolated(), mode, enable_python_dispatcher(), torch.no_grad(), quiet:
        yield
