"""Graph passes on scans, before Inductor lowers them.

The plan of each scan (``rewrites``) is written into the graph: its work before and after the
loop as ordinary nodes, which Inductor fuses and lowers like any others, around a smaller
scan. Pointwise work stays in the loop, where Inductor fuses it.
"""

from __future__ import annotations

import logging

from torch import fx

from torch_scan_hop import legality
from torch_scan_hop._torch.capabilities import attempt, is_there, own_failures_said
from torch_scan_hop._torch.impure import erase_unread
from torch_scan_hop._torch.inductor_checks import mark_as_holding_a_scan, report_outside_of_threads
from torch_scan_hop._torch.own_scan import is_torchs
from torch_scan_hop.inductor.fused_cells import write_fused_cells
from torch_scan_hop.inductor.joined_parts import mark_joined_parts
from torch_scan_hop.inductor.kernels import replace_large_products
from torch_scan_hop.inductor.numbers_between import keep_numbers_as_scalars
from torch_scan_hop.inductor.rewriter import ScanRewriter
from torch_scan_hop.op import scans_in
from torch_scan_hop.rewrites import using_options

log = logging.getLogger(__name__)


@own_failures_said("the rewriting of a scan", "counted_loop")
def prepare_scans(gm: fx.GraphModule) -> None:
    """Run after Inductor's own post-grad passes, on every graph; bodies included."""
    report_outside_of_threads()
    _let_bools_be_vectors()
    keep_numbers_as_scalars(gm)
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


def _scans_of(gm: fx.GraphModule) -> list[tuple[fx.Node, fx.GraphModule]]:
    """Return scans with their bodies; those of torch's own ``scan()`` are left to torch's pass."""
    return [(node, body) for node, body in scans_in(gm) if not is_torchs(body)]


def _write_plans(gm: fx.GraphModule) -> None:
    legality.check("functional", "Inductor's passes", gm)
    for node, body in _scans_of(gm):
        mark_as_holding_a_scan(gm)
        write_fused_cells(body)
        _write_plans(body)
        ScanRewriter(gm, node, body).rewrite_pairs()
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
