"""Ask Inductor which kernel it would choose for each loop, by running it up to its lowerings."""

from __future__ import annotations

import logging
import operator
import warnings
from collections import Counter
from typing import Any

import torch
from torch import fx

from torch_scan_hop import inductor
from torch_scan_hop._torch.capabilities import require
from torch_scan_hop._torch.functorch_levels import is_wrapped
from torch_scan_hop._torch.isolation import torch_functions_disabled
from torch_scan_hop.body.meta_values import placeholder
from torch_scan_hop.body.node_kinds import operator_name
from torch_scan_hop.cuda_graphs.recording import MOST_STEPS
from torch_scan_hop.errors import named
from torch_scan_hop.explain.facts import Kernel, Resources
from torch_scan_hop.explain.sites import Site
from torch_scan_hop.op import scan_op, scan_options

_BATCHED = "not known here: vmap around it adds a batch, which these sizes leave out"

log = logging.getLogger(__name__)


def kernels_of(site: Site) -> tuple[Kernel, ...]:
    """Return what each loop becomes; one entry that says why, if that is not known."""
    if site.operands.xs[0].device.type == "xla":
        return ()  # a While, in every case
    tensors = [v for v in site.operands.flat() if isinstance(v, torch.Tensor)]
    if any(map(is_wrapped, tensors)):
        return (Kernel("forward", _BATCHED, "", ""),)
    found: list[Kernel] = []
    name = "forward"

    def take(call: Any, chosen: Any, refusals: dict[Any, str]) -> None:
        found.append(_kernel(name, call, chosen, refusals))

    try:
        for capability in ("explain", "counted_loop", "cpu_kernels", "gpu_kernels"):
            require(capability)
        from torch_scan_hop._torch.inductor_dry_run import compiled_graphs, lower
        from torch_scan_hop.inductor.watch import watching

        inductor.register()
        # the graph says on which device all is: a default device would be Inductor's, too
        with torch_functions_disabled():
            graphs = compiled_graphs(*_alone(site))
            for name, graph in graphs.items():
                with watching(take):
                    lower(graph, name == "backward", len(graphs) == 1)
    except Exception as error:  # a compiler has many reasons, and none is one to fail for
        log.debug("Inductor was asked about a scan, and failed", exc_info=True)
        found.append(Kernel(name, f"unknown: {named(error)}", "", ""))
    return tuple(found)


def _alone(site: Site) -> tuple[fx.GraphModule, list[Any]]:
    """Return a graph of that scan alone, and its inputs. Floats are as they were traced."""
    graph = fx.Graph()
    inputs: list[Any] = []

    def operand(value: Any) -> Any:
        if isinstance(value, torch.SymFloat):
            return value.node.hint if value.node.hint is not None else 1.0
        inputs.append(value)
        return placeholder(graph, f"operand_{len(inputs) - 1}", value)

    groups = site.operands.map(operand)
    arguments = (graph.get_attr("body"), groups.carry, groups.xs, tuple(groups.additional))
    options = scan_options(site.reverse, site.checkpoint)
    results = graph.call_function(scan_op, arguments, options)
    n_results = len(site.operands.carry) + len(site.ys)
    graph.output(
        tuple(graph.call_function(operator.getitem, (results, k)) for k in range(n_results))
    )
    return fx.GraphModule({"body": site.body}, graph), inputs


def _kernel(loop: str, call: Any, chosen: Any, refusals: dict[Any, str]) -> Kernel:
    from torch_scan_hop.inductor import cpu, gpu
    from torch_scan_hop.inductor.kernels import is_on_gpu
    from torch_scan_hop.inductor.replayed import CUDA_GRAPH

    on_gpu = is_on_gpu(call.examples.flat())
    better = gpu.KERNELS if on_gpu else cpu.KERNELS
    why_not = {kernel.kind: refusals[kernel] for kernel in better if kernel in refusals}
    not_a_graph = refusals.get(CUDA_GRAPH, "") if on_gpu else ""
    why_not |= {CUDA_GRAPH: not_a_graph} if not_a_graph else {}
    operators = [operator_name(n) for n in call.body.graph.nodes if n.op == "call_function"]
    counts = Counter(name for name in operators if name != "getitem")
    return Kernel(
        loop=loop,
        kind=chosen.kind if chosen is not None else "a counted loop",
        steps=count if (count := str(call.trip_count)).isdigit() else "T",
        operators=", ".join(f"{n} x {name}" if n > 1 else name for name, n in counts.items()),
        why_not=why_not,
        launches=_launches(call, chosen is not None, not_a_graph) if on_gpu else "",
        program=_program(chosen) if isinstance(chosen, gpu.KERNELS) else None,
    )


def _program(kernel: Any) -> Resources:
    """Return what a program takes, on the GPU at hand or the one that stands in for it."""
    from torch_scan_hop.inductor.gpu.serving import capability_of

    major, minor = capability_of(torch.device("cuda"))
    chosen, capability = kernel.step, 10 * major + minor
    elements = f"{chosen.block} {kernel.unit if chosen.block > 1 else kernel.unit.rstrip('s')}"
    try:
        from torch_scan_hop._torch.triton_code import code_of

        text, dtypes = chosen.source.text, chosen.source.dtypes
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Triton's, of its next release
            code = code_of(text, dtypes, chosen.block, chosen.warps, capability)
    except ImportError:
        note = "not known without Triton"
    except Exception as error:
        log.debug("Triton was asked about a kernel, and failed", exc_info=True)
        note = f"not known, since Triton failed: {type(error).__name__}"
    else:
        found = code.shared, code.registers, code.spilled
        return Resources(elements, chosen.warps, *found, capability)
    known = chosen.nbytes or None
    return Resources(elements, chosen.warps, known, None, None, capability, note)


def _launches(call: Any, is_kernel: bool, not_a_graph: str) -> str:
    """Return what is launched in a call."""
    if is_kernel:
        return "one"
    if not_a_graph:
        return "those of a step, in every step"
    n_stacks = len(call.examples.inputs.xs) + len(call.examples.ys)
    many = f"one, and {n_stacks} copies, for each block of up to {MOST_STEPS} steps"
    return f"{many}, as a CUDA graph, from the second call on"
