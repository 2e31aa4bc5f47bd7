"""Make scans in a body return only those ys that something reads."""

from __future__ import annotations

import operator

from torch import fx

from torch_scan_hop import legality
from torch_scan_hop._torch.impure import erase_unread
from torch_scan_hop.body.copies import copied
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.op import scans_in
from torch_scan_hop.signature import results_of


def trim_scans(module: fx.GraphModule) -> None:
    """Make scans in ``module`` return only the ys that something reads."""
    for node, body in scans_in(module):
        _trim_scan(module, node, body)
    erase_unread(module.graph)
    module.recompile()
    legality.checked("trim_scans", module)


def _trim_scan(module: fx.GraphModule, node: fx.Node, body: fx.GraphModule) -> None:
    results = results_of(body.graph)
    users = [u for u in node.users if u.target is operator.getitem]
    read = {u.args[1] for u in users if u.users}
    n_carry = len(node.args[1])  # type: ignore[arg-type]
    kept = [k for k in range(len(results)) if k < n_carry or k in read]
    if len(kept) == len(results) or len(users) != len(node.users):
        return
    name = f"{node.args[0].target}_trimmed"  # type: ignore[union-attr]
    while hasattr(module, name):
        name += "_"
    trimmed = copied(body, [results[k] for k in kept], "ScanBody")
    erase_unread(trimmed.graph)
    trimmed.recompile()
    module.add_submodule(name, trimmed)
    with module.graph.inserting_before(node):
        node.args = (module.graph.get_attr(name), *node.args[1:])
    position = {old: new for new, old in enumerate(kept)}
    for user in users:
        if user.users:
            user.args = (node, position[user.args[1]])  # type: ignore[index]
        else:
            module.graph.erase_node(user)
    node.meta["val"] = tuple(value_of(node)[k] for k in kept)
