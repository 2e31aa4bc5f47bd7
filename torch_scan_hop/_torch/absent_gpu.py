"""Differentiate and lower fakes of a GPU that is not there (checked on torch 2.9.1, 2.13.0 without
CUDA, 2.15.0).

On the way torch asks a driver, and is answered here. Inductor asks for the properties of the card.
Autograd and indexing ask for the device's guard, a table of C++ functions that a build without CUDA
does not have. The guard of device "meta", which does nothing, stands in its place. All of it is for
fakes of device "cuda".
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import autograd, fx
from torch._subclasses.meta_utils import MetaTensorDescriber

from torch_scan_hop._torch.engine_in_python import gradients, noting_who_takes_none
from torch_scan_hop._torch.fakes import FakeTensor
from torch_scan_hop._torch.replaced import replaced, wrapped

#: the properties of an H100 that Inductor asks for
PROPERTIES = types.SimpleNamespace(
    name="absent", major=9, minor=0, multi_processor_count=132, warp_size=32, total_memory=2**36,
    regs_per_multiprocessor=2**16, max_threads_per_multi_processor=2048, L2_cache_size=50 * 2**20,
    max_threads_per_block=1024, shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
    gcnArchName="", uuid="", is_integrated=False,
)  # fmt: skip

_ANSWERS: dict[str, Callable[..., Any]] = {
    "torch.cuda.get_device_properties": lambda *_: PROPERTIES,
    "torch.cuda.get_device_capability": lambda *_: (PROPERTIES.major, PROPERTIES.minor),
    "torch.cuda.current_device": lambda: 0,
    "torch.cuda.device_count": lambda: 1,
    "torch.cuda.is_bf16_supported": lambda *_, **__: True,
    "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
    "torch._dynamo.device_interface.CudaInterface.get_device_properties": lambda *_: PROPERTIES,
    "torch._dynamo.device_interface.CudaInterface.is_bf16_supported": lambda **_: True,
    "torch.utils._triton.triton_hash_with_backend": lambda: "absent",
    "torch._inductor.scheduler.has_triton": lambda *_: True,
}

_lock = threading.RLock()


#: ``c10::impl::device_guard_impl_registry``, an array of pointers, one for each type of device
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"


@functools.cache
def _guards() -> Any:
    array = ctypes.c_void_p * (_number("Meta") + 1)
    try:
        return array.in_dll(ctypes.CDLL(torch._C.__file__), _GUARDS)
    except (ValueError, OSError):  # no such symbol: on Windows it is called otherwise
        return None


def _number(device: str) -> int:
    types: Any = torch._C._autograd.DeviceType
    return int(types.__members__[device])


def why_not_here() -> str:
    """Return why nothing can stand in for a GPU with this build of torch."""
    guards = _guards()
    is_known = guards is not None and guards[_number("Meta")] is not None
    return "" if is_known else f"its library does not export {_GUARDS}"


@contextlib.contextmanager
def _guard_of_meta() -> Iterator[None]:
    guards, cuda = _guards(), _number("CUDA")
    before = guards[cuda]
    guards[cuda] = guards[_number("Meta")]
    try:
        yield
    finally:
        guards[cuda] = before


def is_fake_on(value: Any, device: str) -> bool:
    return isinstance(value, FakeTensor) and value.device.type == device


@contextlib.contextmanager
def standing_in(parts: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Let fakes of a GPU be differentiated and lowered as on a machine that has it.

    ``parts``: operators of a GPU, written in parts. torch finds the shapes of those that have no
    kernel for shapes by running them, which needs the GPU; here their parts find them.
    """
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder

    with _lock, _guard_of_meta(), contextlib.ExitStack() as stack:
        for name, answer in _ANSWERS.items():
            owner, attribute = _place_of(name)
            stack.enter_context(replaced(owner, **{attribute: answer}))
        stack.enter_context(wrapped(UniformValueConstantFolder, _deduce_value=_deduced_on_the_cpu))
        stack.enter_context(noting_who_takes_none())
        stack.enter_context(replaced(autograd, _engine_run_backward=_engine()))
        shapes = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        for target, in_parts in parts.items():
            if not torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "Meta"):
                shapes.impl(target, in_parts, "Meta")
        yield


def taken_for_those_on(device: str) -> contextlib.AbstractContextManager[None]:
    """Let fakes that are made of tensors on the CPU be on that device."""
    there = torch.device(device, 0)

    def describe(as_it_is: Any, self: Any, t: torch.Tensor, **kwargs: Any) -> Any:
        found = as_it_is(self, t, **kwargs)
        return dataclasses.replace(found, device=there) if t.device.type == "cpu" else found

    return wrapped(MetaTensorDescriber, describe_tensor=describe)


def _engine() -> Callable[..., Any]:
    """Return autograd's engine, replaced for outputs on a GPU by the walk of ``engine_in_python``.

    The engine asks for the stream of their tensors.
    """
    original = autograd._engine_run_backward

    @functools.wraps(original)
    def run(
        outputs: Any, cotangents: Any, retain: bool, create: bool, inputs: Any = (), *rest: Any,
        **options: Any,
    ) -> Any:  # fmt: skip
        if inputs and any(
            getattr(o, "device", torch.device("cpu")).type == "cuda" for o in outputs
        ):
            return gradients(outputs, cotangents, inputs, create)
        return original(outputs, cotangents, retain, create, inputs, *rest, **options)

    return run


def _deduced_on_the_cpu(original: Callable[..., Any], self: Any, node: fx.Node) -> Any:
    """Let Inductor's pass that folds tensors of one value make its samples on the CPU."""
    kwargs = node.kwargs
    if getattr(kwargs.get("device"), "type", "") != "cuda":
        return original(self, node)
    node.kwargs = {**kwargs, "device": torch.device("cpu")}
    try:
        return original(self, node)
    finally:
        node.kwargs = kwargs


def _place_of(name: str) -> tuple[Any, str]:
    """Return the module or class that holds the last name of a dotted path, and that name."""
    path, _, attribute = name.rpartition(".")
    try:
        return importlib.import_module(path), attribute
    except ModuleNotFoundError:
        outer, inner = _place_of(path)
        return getattr(outer, inner), attribute
