"""Set aside what stands in the way of a capture: modes, limits, some of Dynamo's own checks."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._dynamo import bytecode_transformation
from torch._dynamo import config as dynamo_config
from torch._export.non_strict_utils import _NonStrictTorchFunctionHandler
from torch._functorch._aot_autograd import utils as export_utils
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.meta_utils import MetaTensorDescriber
from torch.fx.experimental.proxy_tensor import (
    PreDispatchTorchFunctionMode,
    TorchFunctionMetadataMode,
)
from torch.nn.modules import module as module_hooks
from torch.overrides import (
    _get_current_function_mode_stack,
    _len_torch_function_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from torch_scan_hop._torch.replaced import replaced, wrapped


@contextlib.contextmanager
def not_fx_tracing() -> Iterator[None]:
    """Let Dynamo start inside an FX trace. It refuses to, though make_fx's is no obstacle."""
    symbolic_trace: Any = torch.fx._symbolic_trace
    if hasattr(symbolic_trace, "_set_is_fx_tracing"):
        before = symbolic_trace._get_is_fx_tracing()
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


@contextlib.contextmanager
def no_code_is_kept() -> Iterator[None]:
    """Let Dynamo keep no code objects.

    It keeps the last 128 that it read, and what is captured lives as long as its code. A notebook's
    cell that is defined again would leave all that was captured of it behind.
    """
    try:
        yield
    finally:
        cached = getattr(bytecode_transformation, "_cached_cleaned_instructions", None)
        if cached is not None:
            cached.cache_clear()


@contextlib.contextmanager
def no_logs_of_mistakes() -> Iterator[None]:
    """Silence the twenty lines that fakes log before they raise for shapes that do not fit.

    Such shapes are the caller's mistake. The loop raises it at its line, or a warning says it.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def holds_no_error(record: logging.LogRecord) -> bool:
        return record.exc_info is None

    logger.addFilter(holds_no_error)
    try:
        yield
    finally:
        logger.removeFilter(holds_no_error)


@contextlib.contextmanager
def gradients_looked_for() -> Iterator[None]:
    """Silence the warning that Dynamo causes where state is no leaf, since it asks for a gradient:
    a program that makes errors of warnings would not be captured."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
        yield


def parameters_of_symbolic_size() -> contextlib.AbstractContextManager[None]:
    """Let fakes have a symbolic number of bytes.

    Dynamo counts the bytes of the parameters that it guards, and for make_fx's there may be no
    number.
    """
    if torch._C._len_torch_dispatch_stack() == 0:
        return contextlib.nullcontext()
    return replaced(FakeTensor, nbytes=property(lambda self: self.numel() * self.element_size()))


def functorch_views() -> contextlib.AbstractContextManager[None]:
    """Let Dynamo make fakes of functorch wrappers that are views, or results of operators.

    Every dual tensor is a view, and ``grad`` of a function that computes ``init`` gives no leaf.
    Dynamo's fakes of wrappers are neither, and it asserts that they are what they stand for; a
    body that captures them reads them, and what it may do with them does not depend on that.
    """
    if peek_interpreter_stack() is None:
        return contextlib.nullcontext()

    def describe(original: Any, self: Any, t: torch.Tensor, **kwargs: Any) -> Any:
        description = original(self, t, **kwargs)
        if description.is_functorch_wrapped:
            description = dataclasses.replace(description, is_view=False, is_leaf=True)
        return description

    return wrapped(MetaTensorDescriber, describe_tensor=describe)


@contextlib.contextmanager
def without_tracer_modes() -> Iterator[list[Any]]:
    """Set make_fx's own torch-function modes aside: they count calls, which no guard can hold.
    So is torch.export's, which leads around what Dynamo can trace, and parts of which it cannot.

    If one trace runs in another, as in ``torch.func.linearize``, there are modes of both.
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


@contextlib.contextmanager
def without_export_hooks() -> Iterator[None]:
    """Set the hook aside by which torch.export watches the buffers that a program assigns to.

    Dynamo cannot trace that hook of all modules, and a body does not need it: what it writes to a
    buffer leaves the scan as a result, and is written after the scan. torch 2.9 leaves the hook
    there when an export fails.
    """
    hooks = module_hooks._global_buffer_registration_hooks
    before = list(hooks.items())
    for key, hook in before:
        if getattr(hook, "__module__", None) == export_utils.__name__:
            del hooks[key]
    try:
        yield
    finally:
        hooks.clear()
        hooks.update(before)


#: the last is torch.export's, which stands in for what Dynamo does
_TRACER_MODES = (
    PreDispatchTorchFunctionMode,
    TorchFunctionMetadataMode,
    _NonStrictTorchFunctionHandler,
)


def under_tracer_modes() -> bool:
    """Return True if a mode that :func:`without_tracer_modes` sets aside is active."""
    if _len_torch_function_stack() == 0:
        return False
    return any(isinstance(mode, _TRACER_MODES) for mode in _get_current_function_mode_stack())


# a body may be called with many closures, shapes and functorch stacks
CAPTURES_PER_FUNCTION = 64


def more_captures(floats_vary: bool) -> contextlib.AbstractContextManager[None]:
    config: Any = dynamo_config
    wanted = {
        "recompile_limit": max(config.recompile_limit, CAPTURES_PER_FUNCTION),
        # torch_xla's Dynamo bridge turns these the other way for the whole process
        "automatic_dynamic_shapes": True,
        "specialize_float": not floats_vary,
        # Guards that torch.compile leaves out to be faster: a loop sees the hook that a module gets
        # after a call, and that a parameter's data have another size, or that it is frozen.
        "skip_nnmodule_hook_guards": False,
        "skip_tensor_guards_with_matching_dict_tags": False,
        # A module counts its steps: a capture serves all counts, as it does of other objects.
        "allow_unspec_int_on_nn_module": True,
        # Numbers of numpy's are numpy's, seed included: such a body runs as the loop that draws
        # them.
        "use_numpy_random_stream": True,
    }
    if hasattr(config, "replay_side_effects"):
        # torch.export turns it off for programs that it takes from Dynamo. This capture is run, by
        # a program that goes on with what steps have left in variables and attributes.
        wanted |= {"replay_side_effects": True, "side_effect_replay_policy": "silent"}
    return replaced(config, **wanted)


_utils = torch._higher_order_ops.utils


def hop_capture() -> contextlib.AbstractContextManager[None]:
    """Tell torch >= 2.13, which wants to know it, that a higher-order operator is compiled."""
    tls = getattr(_utils, "_hop_compile_tls", None)
    if tls is None:
        return contextlib.nullcontext()
    tls.in_hop_compile = getattr(tls, "in_hop_compile", False)
    return replaced(tls, in_hop_compile=True)


_MODE_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)


@contextlib.contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Set a user's dispatch modes aside, under which Dynamo does not start.

    torch 2.9 remembers a mode in flags as well.
    """
    flags = {name: False for name in _MODE_FLAGS if name in vars(_python_dispatch)}
    with _disable_current_modes(), replaced(_python_dispatch, **flags):
        yield


def sizes_may_be_unknown(tx: Any) -> contextlib.AbstractContextManager[None]:
    """Let operators whose result has a size that values decide make a symbol for it.

    If torch has no such switch, they are refused as before.
    """
    env = tx.output.shape_env
    before: Any = getattr(env, "settings", None)
    if not hasattr(before, "allow_dynamic_output_shape_ops"):
        return contextlib.nullcontext()
    settings = dataclasses.replace(before, allow_dynamic_output_shape_ops=True)
    return replaced(env, settings=settings)


def new_symbols_are_nobodys(tx: Any) -> contextlib.AbstractContextManager[Any]:
    """Let operators be run to see the sizes of their results, in no graph that has the symbols."""
    ignore: Callable[[], contextlib.AbstractContextManager[Any]]
    ignore = getattr(tx.output.shape_env, "ignore_fresh_unbacked_symbols", contextlib.nullcontext)
    return ignore()
