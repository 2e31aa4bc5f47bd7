"""Ask Inductor which kernel it would choose for each loop, by running it up to its lowerings."""

from __future__ import annotations

import logging
import operator
from collections import Counter
from typing import Any

import torch
from torch import fx

from torch_scan_hop import inductor
from torch_scan_hop._torch.capabilities import require
from torch_scan_hop._torch.isolation import torch_functions_disabled
from torch_scan_hop.cuda_graphs.recording import MOST_STEPS
from torch_scan_hop.explain.facts import Kernel
from torch_scan_hop.explain.places import operator_name
from torch_scan_hop.explain.sites import Site
from torch_scan_hop.op import scan_op, scan_options
from torch_scan_hop.rewrites import current_options

log = logging.getLogger(__name__)


def kernels_of(site: Site) -> tuple[Kernel, ...]:
    """Return what each loop becomes; one entry that says why, if that is not known."""
    if site.operands.xs[0].device.type == "xla":
        return ()  # a While, in every case
    found: list[Kernel] = []
    name = "forward"

    def take(call: Any, chosen: Any) -> None:
        found.append(_kernel(name, call, chosen))

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
        first = (str(error).strip().splitlines() or [""])[0]
        found.append(Kernel(name, f"unknown: {type(error).__name__}: {first}", "", ""))
    return tuple(found)


def _alone(site: Site) -> tuple[fx.GraphModule, list[Any]]:
    """Return a graph of that scan alone, and its inputs. Floats are as they were traced."""
    graph = fx.Graph()
    inputs: list[Any] = []

    def operand(value: Any) -> Any:
        if isinstance(value, torch.SymFloat):
            return value.node.hint if value.node.hint is not None else 1.0
        node = graph.placeholder(f"operand_{len(inputs)}")
        node.meta["val"] = value
        inputs.append(value)
        return node

    groups = site.signature.split_inputs(list(map(operand, site.operands.flat())))
    arguments = (graph.get_attr("body"), groups.carry, groups.xs, tuple(groups.additional))
    options = scan_options(site.reverse, site.checkpoint)
    results = graph.call_function(scan_op, arguments, options)
    n_results = site.signature.n_carry + len(site.ys)
    graph.output(
        tuple(graph.call_function(operator.getitem, (results, k)) for k in range(n_results))
    )
    return fx.GraphModule({"body": site.body}, graph), inputs


# --- the choice, and the reasons against the better ones ---
# All that is known here of the kernels and of their predicates:


def _kernel(loop: str, call: Any, chosen: Any) -> Kernel:
    from torch_scan_hop.inductor import cpu, gpu
    from torch_scan_hop.inductor.kernels import is_on_gpu

    kinds: dict[Any, Any] = {
        cpu.PointwiseKernel: ("one kernel, lane by lane", _why_not_pointwise),
        cpu.RowsKernel: ("one kernel, row by row", _why_not_rows),
    }
    on_gpu = is_on_gpu(call.examples.flat())
    if on_gpu:
        kinds = {
            gpu.ParallelKernel: ("one Triton kernel, parallel in time", _why_not_parallel),
            gpu.PointwiseKernel: ("one Triton kernel, lane by lane", _why_not_triton),
            gpu.RowsKernel: ("one Triton kernel, row by row", _why_not_triton_rows),
        }
    why_not: dict[str, str] = {}
    for kernel, (kind, reason) in kinds.items():
        if kernel is chosen:
            break
        why_not[kind] = _off() or reason(call) or _by_lowering(kernel, call)
    kind, launches = kinds[chosen][0] if chosen in kinds else "a counted loop", ""
    if on_gpu:
        not_a_graph, launches = _launches(call, chosen in kinds)
        why_not |= {"a CUDA graph": not_a_graph} if not_a_graph else {}
    operators = [operator_name(n) for n in call.body.graph.nodes if n.op == "call_function"]
    counts = Counter(name for name in operators if name != "getitem")
    return Kernel(
        loop=loop,
        kind=kind,
        steps=count if (count := str(call.trip_count)).isdigit() else "T",
        operators=", ".join(f"{n} x {name}" if n > 1 else name for name, n in counts.items()),
        why_not=why_not,
        launches=launches,
    )


def _launches(call: Any, is_kernel: bool) -> tuple[str, str]:
    """Return why a loop is no CUDA graph, and what is launched in a call."""
    from torch_scan_hop.inductor.replayed import why_not_replayed

    if is_kernel:
        return "", "one"
    reason = why_not_replayed(call)
    if reason:
        return reason, "those of a step, in every step"
    n_stacks = len(call.examples.inputs.xs) + len(call.examples.ys)
    many = f"one, and {n_stacks} copies, for each block of up to {MOST_STEPS} steps"
    return "", f"{many}, as a CUDA graph, from the second call on"


def _off() -> str:
    return "" if current_options().one_kernel else "one_kernel is switched off"


def _by_lowering(kernel: Any, call: Any) -> str:
    from torch_scan_hop._torch.inductor_values import NotPointwise
    from torch_scan_hop.inductor.affine import NotAffine

    try:
        node = kernel.lower(call)
    except NotAffine as error:
        return str(error)
    except NotPointwise as error:
        return f"it needs a buffer within a step ({str(error).splitlines()[0]})"
    return "" if node is not None else "a step reads the carry elsewhere than where it writes it"


def _why_not_triton(call: Any) -> str:
    return _why_not_pointwise(call, _not_served(call))


def _why_not_parallel(call: Any) -> str:
    from torch_scan_hop.inductor.gpu.parallel import why_not_long_and_thin

    if not current_options().parallel_in_time:
        return "parallel_in_time is switched off"
    return _why_not_triton(call) or why_not_long_and_thin(call.examples)


def _not_served(call: Any) -> str:
    from torch_scan_hop.inductor.gpu.serving import are_served

    unfit = "its tensors are of other types, or on two devices; or the wrapper is C++"
    return "" if are_served(call.examples.flat()) else unfit


def _why_not_triton_rows(call: Any) -> str:
    from torch_scan_hop.inductor import gpu

    reason = _why_not_around_products(call)
    if reason:
        return reason
    if not gpu.RowsKernel.may_qualify(call.body):
        return "neither pointwise nor a product with a weight: a scaled addmm"
    return _not_served(call)


def _why_not_around_products(call: Any) -> str:
    from torch_scan_hop.inductor import qualify

    if not any(n.target in qualify.PRODUCTS for n in call.body.graph.nodes):
        return "no product"
    known = {*qualify.PRODUCTS, qualify.CAT}
    others = _operators_that_fail(call.body, qualify.is_pointwise, known)
    return f"neither pointwise nor a product with a weight: {others}" if others else ""


def _why_not_pointwise(call: Any, unfit: str | None = None) -> str:
    from torch_scan_hop.inductor import lane_body, qualify

    others = _operators_that_fail(call.body, qualify.is_pointwise, set())
    if others:
        return f"not pointwise: {others}"
    unfit = _unfit_tensors(call) if unfit is None else unfit
    if unfit:
        return unfit
    one_shape = lane_body.has_one_shape(call.examples)
    return "" if one_shape else "its carries and ys have not one shape"


def _why_not_rows(call: Any) -> str:
    from torch_scan_hop.inductor import qualify
    from torch_scan_hop.inductor.cpu import rows

    reason = _why_not_around_products(call)
    if reason:
        return reason
    if not rows.has_small_products(call.body):
        products = [n for n in call.body.graph.nodes if n.target in qualify.PRODUCTS]
        total = sum(map(_weight_bytes, products))
        if total > rows.WEIGHT_BYTES:
            limit = rows.WEIGHT_BYTES
            return f"its weights take {total:,} bytes, more than {limit:,}: not a core's cache"
        return "a product with sizes or scales that it does not know"
    if not call.examples.inputs.carry:
        return "it has no carry"
    if rows.fits_vectors_of_the_cpu(call.examples):
        return ""
    return _unfit_tensors(call) or "no vector instructions that it knows"


def _weight_bytes(product: fx.Node) -> int:
    weight = product.args[-1].meta["val"]  # type: ignore[union-attr]
    return int(weight.numel()) * weight.element_size()


def _operators_that_fail(body: fx.GraphModule, passes: Any, known: set[Any]) -> str:
    """Return the operators that fail ``passes(body, known)`` when all others are known."""
    targets = {n.target: operator_name(n) for n in body.graph.nodes if n.op == "call_function"}
    failing = [
        name
        for target, name in targets.items()
        if not passes(body, known | (targets.keys() - {target}))
    ]
    return ", ".join(dict.fromkeys(failing))


def _unfit_tensors(call: Any) -> str:
    from torch_scan_hop.inductor.cpu.fits import DTYPES

    tensors = [v for v in call.examples.flat() if isinstance(v, torch.Tensor)]
    results = [*call.examples.inputs.carry, *call.examples.ys]
    devices = {t.device.type for t in tensors} - {"cpu"}
    dtypes = {str(t.dtype).removeprefix("torch.") for t in results if t.dtype not in DTYPES}
    if devices:
        return f"it is for the CPU, and this is on {', '.join(sorted(devices))}"
    return f"not for carries or ys of {', '.join(sorted(dtypes))}" if dtypes else ""
