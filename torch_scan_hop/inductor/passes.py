"""Graph passes on scans, before Inductor lowers them.

The plan of each scan (``rewrites``) is written into the graph: its work before and after the
loop as ordinary nodes, which Inductor fuses and lowers like any others, around a smaller
scan. Pointwise work stays in the loop, where Inductor fuses it.
"""

from __future__ import annotations

import logging

import torch
from torch import fx

from torch_scan_hop import legality
from torch_scan_hop._torch.capabilities import attempt, is_there, own_failures_said
from torch_scan_hop._torch.impure import erase_unread
from torch_scan_hop._torch.inductor_checks import mark_as_holding_a_scan, report_outside_of_threads
from torch_scan_hop._torch.own_scan import is_torchs
from torch_scan_hop.body.meta_values import replace
from torch_scan_hop.inductor.decompositions import write_fused_cells
from torch_scan_hop.inductor.kernels import replace_large_products
from torch_scan_hop.inductor.pairs import mark_joined_parts
from torch_scan_hop.inductor.rewriter import ScanRewriter
from torch_scan_hop.op import scans_in
from torch_scan_hop.rewrites import using_options

aten = torch.ops.aten


log = logging.getLogger(__name__)


@own_failures_said("the rewriting of a scan", "counted_loop")
def prepare_scans(gm: fx.GraphModule) -> None:
    """Run after Inductor's own post-grad passes, on every graph; bodies included."""
    report_outside_of_threads()
    _let_bools_be_vectors()
    _keep_numbers_as_scalars(gm)
    theirs = set(gm.graph.nodes)
    _write_plans(gm)
    _write_out(gm)
    replace_large_products(gm, theirs)
    mark_joined_parts(gm)
    legality.check("bodies", "prepare_scans", gm)


def _let_bools_be_vectors() -> None:
    if is_there("vectors_of_bools"):
        with attempt("vectors_of_bools"):
            from torch_scan_hop._torch.inductor_bools import let_bools_be_vectors

            let_bools_be_vectors()


def _keep_numbers_as_scalars(gm: fx.GraphModule) -> None:
    """Let no kernel make a scalar in double of a number that was read from one.

    Numbers that steps leave in attributes are Python numbers between a scan and the program around
    it. Inductor hands a number to a kernel as a float32, and torch 2.9 generates code that does not
    compile. So a scalar that is made of such a number again (to return it, or to begin the next
    scan) becomes the scalar that it was read from.
    """
    graph = gm.graph
    for target, place in ((aten.scalar_tensor.default, 0), (aten.full.default, 1)):
        for node in graph.find_nodes(op="call_function", target=target):
            number = node.args[place]
            if getattr(number, "target", None) is aten._local_scalar_dense.default:
                scalar = number.args[0]
                if _is_double(node) and _is_double(scalar):
                    replace(node, scalar)


def _is_double(node: fx.Node) -> bool:
    value = node.meta["val"]
    return bool(value.dtype == torch.float64 and value.dim() == 0 and value.device.type == "cpu")


def _scans_of(gm: fx.GraphModule) -> list[tuple[fx.Node, fx.GraphModule]]:
    """Return scans with their bodies; those of torch's own ``scan()`` are left to torch's pass."""
    return [(node, body) for node, body in scans_in(gm) if not is_torchs(body)]


def _write_plans(gm: fx.GraphModule) -> None:
    for scan in _scans_of(gm):
        ScanRewriter(gm, *scan).make_functional()
    legality.check("functional", "Inductor's passes", gm)
    for node, body in _scans_of(gm):
        mark_as_holding_a_scan(gm)
        write_fused_cells(body)
        _write_plans(body)
        ScanRewriter(gm, node, body).rewrite_pairs()
    for scan in _scans_of(gm):
        try:
            ScanRewriter(gm, *scan).draw_seeds()
        except Exception:
            log.warning("the seeds of a scan are drawn in its steps", exc_info=True)
    try:
        while any(ScanRewriter(gm, *scan).split_carry() for scan in _scans_of(gm)):
            pass
    except Exception:
        log.warning("the carry of a scan is not split", exc_info=True)
    for node, body in _scans_of(gm):
        _rewrite_or_leave(gm, node, body)
    erase_unread(gm.graph)
    gm.recompile()


def _write_out(gm: fx.GraphModule) -> None:
    """Write small matrices as scalars, in what the plans left in the loops."""
    for node, body in _scans_of(gm):
        _write_out(body)
        try:
            ScanRewriter(gm, node, body).write_out()
        except Exception:
            log.warning("%s is not written out as scalars", node, exc_info=True)
    erase_unread(gm.graph)
    gm.recompile()


# from one that moves everything it may to one that moves nothing
_CAREFUL: tuple[dict[str, bool], ...] = (
    {},
    {"batch_xs": False, "sink_outputs": False, "blocks": False},
    {
        "batch_xs": False, "sink_outputs": False, "blocks": False, "hoist_invariant": False,
        "contract_accumulators": False,
    },
)  # fmt: skip


def _rewrite_or_leave(gm: fx.GraphModule, node: fx.Node, body: fx.GraphModule) -> None:
    """Rewrite, or drop a rewrite that fails: with fewer of them the scan means the same."""
    for changes in _CAREFUL:
        try:
            with using_options(**changes):
                ScanRewriter(gm, node, body).rewrite()
            return
        except Exception:
            log.warning("a rewrite of %s failed and is left out", node, exc_info=True)
