"""Inductor's graph passes: what they do to a scan and its bodies (checked on torch 2.9.1, 2.13.0,
2.15.0).

Import it only once Inductor is needed: it takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._inductor import fx_utils
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import post_grad
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

from torch_scan_hop._torch.own_scan import is_torchs
from torch_scan_hop._torch.replaced import wrap
from torch_scan_hop._torch.sizes import are_all_known_equal


def replace_scan_pass(op: Any, transform: Callable[[fx.GraphModule], None]) -> None:
    """Run ``transform`` where Inductor would turn scans into while loops.

    Inductor looks that pass up as a module global, and asserts that no scan node remains. torch's
    pass still turns the scans of torch's own ``scan()`` into while loops, and graphs without a scan
    are left alone.
    """

    def run(into_while_loops: Any, gm: fx.GraphModule) -> None:
        if not gm.graph.find_nodes(op="call_function", target=op):
            into_while_loops(gm)
            return
        transform(gm)
        nodes = gm.graph.find_nodes(op="call_function", target=op)
        ours = [node for node in nodes if not is_torchs(getattr(gm, str(node.args[0].target)))]
        if len(ours) < len(nodes):
            for node in ours:
                node.target = _set_aside
            into_while_loops(gm)
            for node in ours:
                node.target = op

    wrap(post_grad, decompose_scan_to_while_loop=run)


def _set_aside(*args: Any, **kwargs: Any) -> Any:
    """Stand for this package's operator while torch's pass looks for its own."""
    raise AssertionError("torch_scan_hop: a graph runs while torch's pass rewrites it")


# Inductor's last passes on a graph, and on the graphs in it: after them values are written in
# place. The last two make the copies for operators that mutate (custom ones, Triton kernels).
_REINPLACE = "reinplace_inplaceable_ops"
_DECOMPOSE = ("decompose_triton_kernel_wrapper_functional", "decompose_auto_functionalized")
# The key under which the first pass tells the last which tensors an operator may not write into.
_COPIED = "only_clone_these_tensors"
_mutating_passes = {name: getattr(post_grad, name) for name in (_REINPLACE, *_DECOMPOSE)}


def keep_functional(is_kept: Callable[[fx.GraphModule], bool]) -> None:
    """Keep those graphs out of the passes that make operators write in place.

    A buffer that a step makes and writes (``z = zeros(3); z[i] = h``) may be the same value at
    every step, and so leave the loop. Written in place, it would keep what earlier steps wrote.
    """

    def unless_kept(run_pass: Any, *args: Any, **kwargs: Any) -> Any:
        # the graph comes last, behind what the pass is bound to
        module = getattr(args[-1], "owning_module", None) if args else None
        return None if module is not None and is_kept(module) else run_pass(*args, **kwargs)

    wrap(post_grad, **dict.fromkeys(_mutating_passes, unless_kept))


def decompose_mutating_operators(gm: fx.GraphModule) -> None:
    """Do what :func:`keep_functional` put off, for a graph that no rewrite will see."""
    for node in gm.graph.nodes:
        # Torch 2.9 takes a node that the re-inplacing pass has not seen for one that may write
        # into all its arguments; here none was proven to be its own.
        if node.target is torch.ops.higher_order.auto_functionalized_v2:
            node.meta[_COPIED] = list(range(len(node.kwargs["_all_bases"])))
        elif node.target is torch.ops.higher_order.auto_functionalized:
            written = [a for a in node.args[0]._schema.arguments if a.is_write]
            node.meta[_COPIED] = [argument.name for argument in written]
    for name in _DECOMPOSE:
        _mutating_passes[name](gm.graph)
    gm.recompile()


def let_scans_be_empty(op: Any) -> None:
    """Give torch 2.13 examples of a step's inputs that suit its body.

    Its own do not. It takes ``xs[0]`` for an example of a slice, which an empty scan has not got.
    It takes ``init`` for an example of a carry, though a carry is contiguous in a step and ``init``
    need not be. And it takes the call's numbers and sizes, though the body may have been traced
    with other symbols for them.
    """

    def with_slices(
        extract: Any, node: fx.Node, valid: Any, *args: Any, **kwargs: Any
    ) -> Iterator[Any]:
        if node.target is not op:
            yield from extract(node, valid, *args, **kwargs)
            return
        body, init, xs, additional = args
        slices = (x.new_empty_strided(x.shape[1:], x.stride()[1:]) for x in xs)
        carry = (c.new_empty(c.shape) for c in init)
        placeholders = body.graph.find_nodes(op="placeholder")
        pairs = zip((*carry, *slices, *additional), placeholders, strict=True)
        yield (
            body,
            tuple(value if _is_known_like(value, p) else p.meta["val"] for value, p in pairs),
        )

    if hasattr(fx_utils, "_extract_subgraphs_and_args"):
        wrap(fx_utils, _extract_subgraphs_and_args=with_slices)


def _is_known_like(value: Any, placeholder: fx.Node) -> bool:
    """Return True if ``value`` is known to be a tensor of the size that the body was traced for."""
    traced = placeholder.meta["val"]
    are_tensors = isinstance(value, torch.Tensor) and isinstance(traced, torch.Tensor)
    return are_tensors and are_all_known_equal(value.shape, traced.shape)


def trace_decomposed(fn: Callable[..., Any], examples: Sequence[Any]) -> fx.GraphModule:
    """Trace ``fn`` to the operators that Inductor's lowerings expect at this stage.

    ``examples`` are the fakes of the graph being compiled; symbols among them stay symbols.
    """
    mode = detect_fake_mode(examples) or V.fake_mode
    with mode, enable_python_dispatcher(), torch.no_grad():
        traced = make_fx(fn, decomposition_table=select_decomp_table(), tracing_mode="real")(
            *examples
        )
    traced.graph.eliminate_dead_code()
    return traced
