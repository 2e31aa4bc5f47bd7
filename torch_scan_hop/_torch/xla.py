"""torch_xla's private APIs (checked on torch_xla 2.9.0, its last release).

Imported on first use of an XLA tensor only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.meta_utils import MetaTensorDescriber

from torch_scan_hop._torch.operators import from_functional as unwrapped
from torch_scan_hop._torch.replaced import wrap

INSTALL = "pip install 'torch==2.9.1' 'torch_xla==2.9.0'"

try:
    import torch_xla
    import torch_xla.core.dynamo_bridge as bridge
    import torch_xla.core.xla_builder as builder
    from torch_xla.experimental import eager_mode_context
except ImportError as error:
    raise ImportError(
        "torch_scan_hop: scan on XLA devices needs torch_xla 2.9.0, its last release, which "
        f"works with torch 2.9 only (this is torch {torch.__version__}). Install both: {INSTALL}"
    ) from error

_c: Any = torch_xla._XLAC

# another shim's, under another name
__all__ = ["unwrapped"]


def is_on_cpu() -> bool:
    """Return True if the device of PJRT is this machine's processor."""
    return torch_xla.runtime.device_type() == "CPU"


# --- tensors ---


def placeholder(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor with a shape and no data. Materializing one, or reading it, is a segfault."""
    return builder.create_placeholder_tensor(tuple(shape), dtype)


def derived(value: Any) -> Any:
    """Return the value of a placeholder as the result of an operator.

    ``mark_sharding`` gives new data to a tensor that holds data, or to its clone. A placeholder
    would be lost then, and a segfault would follow. XLA removes the product.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if not torch_xla.runtime.is_spmd():
        return value.clone()
    return value | False if value.dtype == torch.bool else value * 1


def wrapped(value: Any) -> Any:
    """Return ``value`` as users hold it: an XLA tensor wrapped for C++ functionalization."""
    if isinstance(value, torch.Tensor) and not torch._is_functional_tensor(value):
        return torch._to_functional_tensor(value)
    return value


# --- tracing without executing ---


@contextlib.contextmanager
def above_the_kernel() -> Iterator[None]:
    """Call with functionalization, and without gradients or autocast.

    The operator's XLA kernel runs below functionalization, so that key has to be let in again.
    """
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.Functionalize)
    with (
        torch.no_grad(),
        torch._C._ForceDispatchKeyGuard(include, exclude),
        torch._C._DisableAutocast(),
    ):
        yield


@contextlib.contextmanager
def lowering_mode() -> Iterator[None]:
    """Be lazy, and make numbers constants of the HLO."""
    constants = _c._get_xla_all_numbers_special_scalars()
    # otherwise each number in the body is uploaded, and becomes a parameter of its HLO
    _c._set_xla_all_numbers_special_scalars(True)
    try:
        with eager_mode_context(False), above_the_kernel():
            yield
    finally:
        _c._set_xla_all_numbers_special_scalars(constants)


def executed_fallbacks() -> dict[str, int]:
    """Return how often each operator that XLA cannot lower has run on the CPU."""
    return {name: _c._xla_counter_value(name) for name in _c._get_executed_fallback_ops()}


@dataclass(frozen=True)
class BodyHlo:
    """A lowered computation.

    ``parameters[k]`` is the index of the placeholder that is its k-th parameter, or the tensor
    that the computation reads besides; ``seed`` is the parameter that holds the random seed.
    """

    module: bytes
    parameters: tuple[int | torch.Tensor, ...]
    seed: int | None


def hlo_of(
    outputs: Sequence[torch.Tensor], placeholders: Sequence[torch.Tensor], is_random: bool
) -> BodyHlo:
    """Return the HLO of the pending graph between ``placeholders`` and ``outputs``."""
    context = _c.lowering.LoweringContext("ScanBody")
    context.set_name_string("scan_step")
    context.build(list(outputs))
    found: dict[int, int | torch.Tensor] = dict(context.device_parameter_id_tensor_mapping())
    for k, tensor in enumerate(placeholders):
        parameter = context.tensor_parameter_id(tensor)
        if parameter != -1:
            found[parameter] = k
    seed = _seed_parameter(context) if is_random else None
    return BodyHlo(context.hlo(), tuple(found[k] for k in range(len(found))), seed)


def _seed_parameter(context: Any) -> int | None:
    """Return the parameter that every random operator reads.

    It is found by what one more random operator reads, because the node's own mark
    (``_get_seed_info_id``) is gone once anything has wrapped it in a tensor.
    """
    probe = torch.empty((), device="xla").uniform_()
    _, nodes = _c._get_tensors_xla_device_data_node([probe])
    found = {context.tensor_parameter_id(node) for node in nodes} - {-1}
    assert len(found) <= 1, found
    return found.pop() if found else None


def computation_from_hlo(name: str, module: bytes) -> Any:
    return builder.computation_from_module_proto(name, module)


def call_computation(
    name: str, computation: Any, arguments: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return a pending node that calls ``computation``; its results are not functional wrappers."""
    return list(_c._xla_user_computation(name, arguments, computation))


# --- random state ---


def random_state() -> int:
    """Return a number that each random operator changes; reading it touches no device."""
    return int(_c._xla_get_rng_seed())


def next_random_state(state: int) -> int:
    """Return the next state, by the constants of torch_xla/csrc/xla_graph_executor.cpp."""
    return (2531011 + 214013 * state) % 2**64


def advance_random_state(draws: int) -> None:
    """Leave the state as if ``draws`` random operators had been traced."""
    for _ in range(draws):
        torch.empty((), device="xla").uniform_()


# --- tracing XLA tensors ---


def before_openxla_compiles(prepare: Callable[[torch.fx.GraphModule], None]) -> None:
    """Let ``prepare`` change every graph that the openxla backend is about to compile."""

    def extract_prepared(extract: Any, xla_model: torch.fx.GraphModule, xla_args: Any) -> Any:
        prepare(xla_model)
        return extract(xla_model, xla_args)

    wrap(bridge, extract_compiled_graph=extract_prepared)


def let_fakes_describe_wrapped_tensors() -> None:
    """Let Dynamo make a fake of an XLA tensor in functorch's wrappers (vmap, grad).

    By itself it takes the tensor inside for one that ``torch.func.functionalize`` wrapped, although
    it handles bare XLA tensors, which are functional wrappers as well, without that.
    """

    def describe_tensor(
        describe: Any, self: Any, t: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        found = describe(self, t, *args, **kwargs)
        if found.is_functional and found.unwrapped is None:
            object.__setattr__(found, "is_functional", False)
        return found

    wrap(MetaTensorDescriber, describe_tensor=describe_tensor)


def let_fakes_know_the_device() -> None:
    """Put fakes on "xla" on "xla:0", as on "cuda", because torch would not let the two meet."""

    def with_index(
        new: Any, cls: Any, mode: Any, elem: Any, device: Any, *args: Any, **kwargs: Any
    ) -> Any:
        made = new(cls, mode, elem, device, *args, **kwargs)
        if made.fake_device.type == "xla" and made.fake_device.index is None:
            made.fake_device = torch.device("xla", 0)
        return made

    wrap(FakeTensor, __new__=with_index)


def let_composites_have_derivatives() -> None:
    """Decompose, under autograd, operators of several others for which torch_xla has a kernel.

    Autograd has no derivative of them. When torch_xla runs one, its kernel calls operators that
    have one. But a fake runs no kernel, and in a trace the result would not depend on the inputs.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for qualified in torch._C._dispatch_get_registrations_for_dispatch_key("XLA"):
        if not has_kernel(qualified, "CompositeImplicitAutograd"):
            continue
        namespace, _, name = qualified.partition("::")
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        key = torch._C.DispatchKey.AutogradXLA
        if not has_kernel(qualified, key.name) and key not in operator.py_kernels:
            operator.py_impl(key)(operator.decompose)


def let_gradients_through_mark_sharding() -> None:
    """Give ``torch.ops.xla.aot_mark_sharding`` a derivative: the gradient is sharded like the
    value.

    It has none, and its autograd.Function takes a mesh, which Dynamo cannot put into a graph.
    """
    from torch_xla.distributed.spmd import xla_sharding  # noqa: F401  (registers the operator)

    mark = torch.ops.xla.aot_mark_sharding

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.mesh, ctx.spec = inputs

    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return mark(gradient, ctx.mesh, ctx.spec), None, None

    torch.library.register_autograd("xla::aot_mark_sharding", backward, setup_context=setup_context)
