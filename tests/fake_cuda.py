"""Inductor's code for a GPU, on a machine that has none: its inputs are fakes of device "cuda".

Nothing is compiled by Triton and nothing runs: what comes back is the text of the wrappers.
"""

from __future__ import annotations

import contextlib
import re
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
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from torch_scan_hop import inductor
from torch_scan_hop._torch.inductor_dry_run import compiled_graphs
from torch_scan_hop.explain.device import as_if_there


def a_gpu() -> contextlib.AbstractContextManager[None]:
    """The one that is there, or one that is not."""
    return as_if_there("cuda")


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
        stack.enter_context(a_gpu())
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


def on_cuda(values: Any, mode: FakeTensorMode) -> Any:
    """Fakes of a GPU, of the metadata of the tensors in a tree."""

    def fake(value: torch.Tensor) -> torch.Tensor:
        with mode:
            made = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=torch.device("cuda", 0)
            )
        return made.requires_grad_(value.requires_grad)

    return pytree.tree_map_only(torch.Tensor, fake, values)


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
    with a_gpu():
        with FakeTensorMode() as mode:
            torch.compile(fn, backend=take, fullgraph=True)(*on_cuda(args, mode))
        graphs = compiled_graphs(*captured[0])
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
