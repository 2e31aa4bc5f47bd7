"""Inductor up to its lowerings, without code (checked on torch 2.9.1, 2.13.0, 2.15.0).

Import it only once Inductor is needed: it takes seconds.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config
from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

from torch_scan_hop._torch.replaced import wrapped


def compiled_graphs(gm: fx.GraphModule, examples: Sequence[Any]) -> dict[str, fx.GraphModule]:
    """Return the graphs that Inductor would get: "forward", and "backward" in training."""
    found: dict[str, fx.GraphModule] = {}

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        _recursive_joint_graph_passes(joint)
        options["compiler"] = "inductor"
        parts = min_cut_rematerialization_partition(joint, inputs, **options)
        found["forward"], found["backward"] = parts
        return parts

    def compile_nothing(graph: fx.GraphModule, _: Any) -> Any:
        if not found:  # in inference
            _recursive_joint_graph_passes(graph)
            found["forward"] = graph
        never_called = lambda _: None  # noqa: E731
        never_called._boxed_call = True  # type: ignore[attr-defined]
        return never_called

    def trace() -> None:
        _trace(gm, examples, compile_nothing, partition)

    try:
        trace()
    except TensorifyScalarRestartAnalysis:  # it has noted which floats are to be constants
        found.clear()
        trace()
    finally:
        TensorifyState.clear()
    return found


def _trace(gm: fx.GraphModule, examples: Sequence[Any], compiler: Any, partition: Any) -> None:
    mode = detect_fake_mode(examples)
    tokens = functorch_config.patch(unlift_effect_tokens=True)
    with V.set_fake_mode(mode), tracing(TracingContext(mode)), tokens:
        aot_module_simplified(
            gm,
            list(examples),
            fw_compiler=compiler,
            bw_compiler=compiler,
            inference_compiler=compiler,
            partition_fn=partition,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )


def lower(gm: fx.GraphModule, is_backward: bool, is_inference: bool) -> None:
    """Run Inductor's passes and lowerings on a graph of :func:`compiled_graphs`."""
    examples = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    context = tracing(TracingContext(detect_fake_mode(examples)))
    no_caches = config.patch(fx_graph_cache=False, fx_graph_remote_cache=False)
    with _without_code() as reached, no_caches, context:
        try:
            compile_fx_inner(gm, examples, is_backward=is_backward, is_inference=is_inference)
        except Exception:
            if not reached:
                raise


class _Lowered(Exception):
    """Raised to stop Inductor, when all that was to be known is known."""


@contextlib.contextmanager
def _without_code() -> Iterator[list[bool]]:
    """Stop this thread's Inductor where it would write code; note that in the list it yields."""
    thread, reached = threading.get_ident(), []

    def stop(codegen: Any, self: Any) -> Any:
        if threading.get_ident() != thread:
            return codegen(self)
        reached.append(True)
        raise _Lowered

    with wrapped(GraphLowering, codegen=stop):
        yield reached
