"""Make scans in a body return only those ys that something reads."""

from __future__ import annotations

import operator

from torch import fx

from torch_scan_hop import legality
from torch_scan_hop.op import scan_op
from torch_scan_hop.signature import results_of


def trim_scans(module: fx.GraphModule) -> None:
    """Make scans in ``module`` return only the ys that something reads."""
    for node in module.graph.find_nodes(op="call_function", target=scan_op):
        _trim_scan(module, node)
    module.graph.eliminate_dead_code()
    module.recompile()
    legality.checked("trim_scans", module)


def _trim_scan(module: fx.GraphModule, node: fx.Node) -> None:
    body_node, init = node.args[:2]
    assert isinstance(body_node, fx.Node)
    body = getattr(module, str(body_node.target))
    results = results_of(body.graph)
    users = [u for u in node.users if u.target is operator.getitem]
    read = {u.args[1] for u in users if u.users}
    n_carry = len(init)  # type: ignore[arg-type]
    kept = [k for k in range(len(results)) if k < n_carry or k in read]
    if len(kept) == len(results) or len(users) != len(node.users):
        return
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(body.graph, env)
    graph.output(tuple(env[results[k]] for k in kept))
    name = f"{body_node.target}_trimmed"
    while hasattr(module, name):
        name += "_"
    trimmed = fx.GraphModule(body, graph, "ScanBody")
    trimmed.graph.eliminate_dead_code()
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
    node.meta["val"] = tuple(node.meta["val"][k] for k in kept)
