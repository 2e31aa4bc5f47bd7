"""Inductor's code for a GPU, on a machine that has none: its inputs are fakes of device "cuda".

Nothing is compiled by Triton and nothing runs: what comes back is the text of the wrappers.
"""

from __future__ import annotations

import contextlib
import re
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.cudagraph_utils import check_multiple_devices_or_any_cpu_nodes
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import MultiOutput
from torch._inductor.utils import get_first_incompatible_cudagraph_node
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from torch_scan_hop import inductor
from torch_scan_hop._torch.inductor_dry_run import compiled_graphs

# of an H100, as far as Inductor asks for them
PROPERTIES = types.SimpleNamespace(
    name="fake", major=9, minor=0, multi_processor_count=132, warp_size=32, total_memory=2**36,
    regs_per_multiprocessor=2**16, max_threads_per_multi_processor=2048, L2_cache_size=50 * 2**20,
    max_threads_per_block=1024, shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
    gcnArchName="", uuid="", is_integrated=False,
)  # fmt: skip

NO_DRIVER = {
    "torch.cuda.get_device_properties": lambda *_: PROPERTIES,
    "torch.cuda.get_device_capability": lambda *_: (9, 0),
    "torch.cuda.current_device": lambda: 0,
    "torch.cuda.device_count": lambda: 1,
    "torch._dynamo.device_interface.CudaInterface.get_device_properties": lambda *_: PROPERTIES,
    "torch._dynamo.device_interface.CudaInterface.is_bf16_supported": lambda **_: True,
    "torch.utils._triton.triton_hash_with_backend": lambda: "fake",
    "torch._inductor.scheduler.has_triton": lambda *_: True,
}


class _Done(Exception):
    """The code is there."""


@contextlib.contextmanager
def _without_driver() -> Iterator[list[str]]:
    """Inductor up to its code, which is appended to the list."""
    found: list[str] = []
    codegen = GraphLowering.codegen

    def stop(self: Any) -> Any:
        code = codegen(self)[0]
        against_graphs.append(_why_no_graph(self))
        found.append(getattr(code, "value", code))
        raise _Done

    with contextlib.ExitStack() as stack:
        for name, value in () if torch.cuda.is_available() else NO_DRIVER.items():
            stack.enter_context(mock.patch(name, value))
        stack.enter_context(mock.patch.object(GraphLowering, "codegen", stop))
        stack.enter_context(config.patch(fx_graph_cache=False, compile_threads=1))
        yield found


def _wrapper(graph: fx.GraphModule, is_backward: bool, is_inference: bool) -> str:
    examples = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")]
    context = tracing(TracingContext(detect_fake_mode(examples)))
    with _without_driver() as found, context:
        try:
            compile_fx_inner(graph, examples, is_backward=is_backward, is_inference=is_inference)
        except Exception:
            if not found:
                raise
    return found[0]


def _on_cuda(value: Any) -> Any:
    """A fake tensor, or a device, as it is on a GPU."""
    if isinstance(value, torch.device):
        return torch.device("cuda", 0)
    if not isinstance(value, FakeTensor):
        return value
    with value.fake_mode, torch.no_grad():
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=torch.device("cuda", 0)
        )


def _move_to_cuda(gm: fx.GraphModule) -> None:
    """Autograd asks the driver for a stream, so that graphs are made on the CPU and moved."""
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            node.args = pytree.tree_map(_on_cuda, node.args)
            node.kwargs = pytree.tree_map(_on_cuda, node.kwargs)
            if "val" in node.meta:
                node.meta["val"] = pytree.tree_map(_on_cuda, node.meta["val"])
        module.recompile()


#: what torch has against a CUDA graph of what was compiled last, forward first
against_graphs: list[str] = []


def _why_no_graph(graph: GraphLowering) -> str:
    """As ``mode="reduce-overhead"`` finds it, but for what it asks of a driver."""
    unfit = get_first_incompatible_cudagraph_node(graph.module)
    elsewhere = check_multiple_devices_or_any_cpu_nodes(graph.device_node_mapping)
    reasons = (graph.disable_cudagraphs_reason, unfit and str(unfit.target), elsewhere)
    nodes = [n for n in graph.scheduler.nodes if not isinstance(n.node, MultiOutput)]
    return next(filter(None, (*reasons, *map(graph.scheduler.should_partition, nodes))), "")


def wrappers(fn: Callable[..., Any], *args: Any) -> dict[str, str]:
    """The wrapper of ``fn`` for a GPU; and of its backward, where an argument requires gradients.

    ``fn`` closes over nothing: what it computes with are its arguments, trees of tensors.
    """
    captured: list[Any] = []
    against_graphs.clear()

    def take(gm: fx.GraphModule, examples: list[Any]) -> Any:
        captured.append((gm, examples))
        return gm

    inductor.register()
    with FakeTensorMode() as mode:
        fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, args)
        torch.compile(fn, backend=take, fullgraph=True)(*fakes)
    graphs = compiled_graphs(*captured[0])
    for graph in graphs.values():
        _move_to_cuda(graph)
    return {
        name: _wrapper(graph, name == "backward", len(graphs) == 1)
        for name, graph in graphs.items()
    }


_KERNEL = re.compile(
    r"^(scan_kernel_\d+) = ScanKernel\('''\n(.*?)''', block=(\d+), num_warps=(\d+)\)", re.S | re.M
)


def scan_kernels(wrapper: str) -> list[tuple[str, int, int]]:
    """Source, lanes of a program and warps of our kernels in a wrapper."""
    return [
        (source, int(block), int(warps)) for _, source, block, warps in _KERNEL.findall(wrapper)
    ]


def launches(wrapper: str) -> int:
    """Kernels that one call of the wrapper launches: ours, Inductor's and those of libraries."""
    call = wrapper[wrapper.index("def call(") :]
    call = call[: call.index("\nrunner = ")] if "\nrunner = " in call else call
    return len(
        re.findall(r"^\s+(scan_kernel_\d+\(|\w+\.run\(|extern_kernels\.|torch\.ops\.)", call, re.M)
    )
