"""A GPU that is not there: fakes of it, differentiated and lowered (checked on torch 2.15.0).

What torch asks a driver for on the way is answered here: by Inductor, the properties of the card;
by autograd, the stream of each tensor. All of it is for fakes of device "cuda", on a build of torch
for CUDA. On another build, and on torch 2.9, the process ends where such a fake enters a graph of
autograd (2.13 was not tried: its build for CUDA was not at hand).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import autograd, fx

from torch_scan_hop._torch.engine_in_python import gradients, noting_who_takes_none
from torch_scan_hop._torch.fakes import FakeTensor
from torch_scan_hop._torch.replaced import replaced

__all__ = ["OLDEST", "are_absent", "standing_in", "why_not_here"]

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


OLDEST = "2.15"


def why_not_here() -> str:
    """Return why nothing can stand in for a GPU on this torch."""
    if torch.version.cuda is None:
        return "is built without"
    return "" if torch.__version__ >= OLDEST else f"is older than {OLDEST}"


def are_absent(values: Iterable[Any]) -> bool:
    """Return True if some of ``values`` are fakes on a GPU, and this machine has none."""
    on_cuda = (v for v in values if isinstance(v, torch.Tensor) and v.device.type == "cuda")
    return any(isinstance(v, FakeTensor) for v in on_cuda) and not torch.cuda.is_available()


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """Let fakes of a GPU be differentiated and lowered as on a machine that has it."""
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder

    with _lock, contextlib.ExitStack() as stack:
        for name, answer in _ANSWERS.items():
            owner, attribute = _place_of(name)
            stack.enter_context(replaced(owner, **{attribute: answer}))
        folder = UniformValueConstantFolder
        deduce = _folds_on_the_cpu(folder._deduce_value)
        stack.enter_context(replaced(folder, _deduce_value=deduce))
        stack.enter_context(noting_who_takes_none())
        stack.enter_context(replaced(autograd, _engine_run_backward=_engine()))
        yield


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


def _folds_on_the_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let Inductor's pass that folds tensors of one value make its samples on the CPU."""

    @functools.wraps(original)
    def deduce(self: Any, node: fx.Node) -> Any:
        kwargs = node.kwargs
        if getattr(kwargs.get("device"), "type", "") != "cuda":
            return original(self, node)
        node.kwargs = {**kwargs, "device": torch.device("cpu")}
        try:
            return original(self, node)
        finally:
            node.kwargs = kwargs

    return deduce


def _place_of(name: str) -> tuple[Any, str]:
    """Return the module or class that holds the last name of a dotted path, and that name."""
    path, _, attribute = name.rpartition(".")
    try:
        return importlib.import_module(path), attribute
    except ModuleNotFoundError:
        outer, inner = _place_of(path)
        return getattr(outer, inner), attribute
