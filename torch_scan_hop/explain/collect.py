"""Collect the facts about a call or a program. Everything is traced on fakes; nothing is run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from torch_scan_hop import tree
from torch_scan_hop.api import scan_tree
from torch_scan_hop.arguments import CheckedCall
from torch_scan_hop.capture.reasons import GENERAL_FIX, Reason, reason_of, remembered_reason
from torch_scan_hop.capture.replay import NotCaptured, history_of, look_at_call
from torch_scan_hop.capture.steady import BRANCH
from torch_scan_hop.capture.user_code import code_of, name_of
from torch_scan_hop.debugging import is_debugging
from torch_scan_hop.eager.few_steps import runs_as_written
from torch_scan_hop.errors import describe
from torch_scan_hop.explain.costs import Limits
from torch_scan_hop.explain.explanation import Explanation
from torch_scan_hop.explain.facts import Captures, Checkpoint, Leaf, Scan
from torch_scan_hop.explain.kernels import kernels_of
from torch_scan_hop.explain.loops import loop_of
from torch_scan_hop.explain.sites import (
    Site,
    graphs_in,
    namer,
    nbytes_of,
    readable,
    recorded,
    renamed,
    site_of,
)
from torch_scan_hop.explain.training import describe_policy, is_trained, training_of
from torch_scan_hop.op import ScanOptions, scans_in
from torch_scan_hop.step import start_of

# --- one scan ---


def scan_facts(site: Site, limits: Limits | None, kernels: bool) -> Scan:
    loops, memory = [], None
    training = training_of(site) if is_trained(site) else None
    # what requires a gradient may be read by way of detach() alone: then there is no backward
    if training is not None and any(training.derivative.flow.outputs(has_steps=True)):
        memory = training.memory()
        loops.append(loop_of(training.forward_site(), "forward", limits))
        backward = training.backward_site()
        loops.append(loop_of(backward, "backward", limits, training.shifted_bytes()))
    else:
        loops.append(loop_of(site, "forward", limits))
    return Scan(
        name=site.name,
        steps=site.steps,
        reverse=site.reverse,
        signature=tuple(_signature(site)),
        loops=tuple(loops),
        memory=memory,
        kernels=kernels_of(site) if kernels else (),
        note=_steps_before(site),
    )


def _steps_before(site: Site) -> str:
    if not site.settled:
        return ""
    leaves = ", ".join(dict.fromkeys(site.settled))
    if any(name.startswith(BRANCH) for name in site.settled):
        return f"other steps are on their own, before these: after them {leaves} differs"
    return f"the first step is on its own, before these: after it {leaves} differs"


def _signature(site: Site) -> list[Leaf]:
    o, names = site.operands, site.names
    found = [_leaf("carry", n, v, v) for n, v in zip(names.carry, o.carry, strict=True)]
    # of a fake on a GPU that is not there, torch 2.9 makes no slice
    slices = (x.new_empty(x.shape[1:], device="meta") for x in o.xs)
    found += [_leaf("x", n, s, x) for n, s, x in zip(names.xs, slices, o.xs, strict=True)]
    ys = map(recorded, o.signature.outputs_of(site.body).ys)
    found += [
        Leaf("y", name, describe(y), nbytes_of(y)) for name, y in zip(site.ys, ys, strict=True)
    ]
    closures = zip(names.additional, o.additional, strict=True)
    return found + [_leaf("closure", name, value, value) for name, value in closures]


def _leaf(role: str, path: str, value: Any, owner: Any) -> Leaf:
    if not isinstance(value, torch.Tensor):
        return Leaf(role, path, str(value), 0)
    return Leaf(role, path, describe(value), nbytes_of(value), owner.requires_grad)


# --- a call of scan ---


def explain_call(
    combine_fn: Any, init: Any, call: CheckedCall, limits: Limits | None, kernels: bool
) -> Explanation:
    title = f"scan of {name_of(code_of(combine_fn))}"
    shown: dict[str, Any] = {"reverse": call.schedule.reverse, "unroll": call.schedule.unroll}
    shown["checkpoint"] = describe_policy(call.schedule.checkpoint)
    options = ", ".join(f"{name}={value}" for name, value in shown.items())
    history = history_of(combine_fn)
    captures = Captures(len(history), tuple(readable_guard(g, combine_fn) for g in history if g))
    try:
        sites = _sites_of_call(combine_fn, init, call)
        return Explanation(
            title,
            captured=True,
            captures=captures,
            options=options,
            scans=tuple(_of_call(site, limits, kernels) for site in sites),
            checkpoint=_checkpoint(combine_fn, init, call, sites),
            limits=limits,
        )
    except NotCaptured as error:
        return _as_loop(title, error.reason, captures, options)


def _of_call(site: Site, limits: Limits | None, kernels: bool) -> Scan:
    scan = scan_facts(site, limits, kernels)
    options = ScanOptions(checkpoint=site.checkpoint)
    few = runs_as_written(site.body, site.operands, options, is_trained(site))
    return replace(scan, note="; ".join(filter(None, [scan.note, _FEW_STEPS if few else ""])))


_FEW_STEPS = (
    "in eager mode these steps are few and small, or fused cells, and run as they are written: "
    "the loops above are those of a compiled scan, and of one with more steps"
)


def _sites_of_call(combine_fn: Any, init: Any, call: CheckedCall) -> list[Site]:
    """Return the scans that ``scan`` would run; raise NotCaptured if it would run a loop."""
    if is_debugging():
        raise NotCaptured("debug() is in force")
    template, carry = start_of(init, call.xs)
    reason = remembered_reason(combine_fn, (init, call.xs), template)
    if reason is not None:
        raise NotCaptured(reason)
    graph, _, names, results, spec = look_at_call(
        scan_tree, combine_fn, template, carry, init, call.xs, call.trip_count, call.schedule, True
    )
    (_, ys), _ = pytree.tree_unflatten(results, spec)
    paths = (_paths(call.xs, "x"), _paths(ys, "y"))
    # what counts the steps where there are no xs
    paths = paths if paths[0] else (["(step)"], paths[1])
    sites = _sites(graph, [readable(name, combine_fn) for name in names], combine_fn)
    return [
        renamed(site, [*_paths(init, "carry", site.settled), *site.places], *paths)
        for site in sites
    ]


def _paths(value: Any, root: str, settled: Sequence[str] = ()) -> list[str]:
    """Return paths of tensors; ``settled`` leaves became tensors after the first step."""
    leaves = tree.leaves_with_paths(value, root)
    return [path for path, leaf in leaves if leaf is not None or path in settled]


def _sites(gm: fx.GraphModule, names: Sequence[str], fn: Any = None) -> list[Site]:
    placeholders = gm.graph.find_nodes(op="placeholder")
    known = {n.name: name for n, name in zip(placeholders, names, strict=True)}
    name = "" if fn is None else code_of(fn).co_name
    found = [scan for graph in graphs_in(gm) for scan in scans_in(graph)]
    many = bool(name) and len(found) > 1
    parts = [f", part {k + 1} of {len(found)}" if many else "" for k in range(len(found))]
    return [
        site_of(node, body, namer(known), name + part or node.name)
        for (node, body), part in zip(found, parts, strict=True)
    ]


def _as_loop(title: str, reason: str, captures: Captures | None, options: str) -> Explanation:
    parts = reason if isinstance(reason, Reason) else Reason(reason)
    found = (parts.why, parts.where, parts.advice or GENERAL_FIX)
    return Explanation(title, False, *found, captures=captures, options=options)


def _checkpoint(
    combine_fn: Any, init: Any, call: CheckedCall, sites: Sequence[Site]
) -> Checkpoint | None:
    policy = call.schedule.checkpoint
    if policy is None or not any(map(is_trained, sites)):
        return None
    plain = call._replace(schedule=call.schedule._replace(checkpoint=None))
    without = _kept(_sites_of_call(combine_fn, init, plain))
    cost = "what it does not save is computed once more" if callable(policy) else _cost_of(policy)
    segment = max(training_of(s).segment_bytes() for s in sites if is_trained(s))
    return Checkpoint(describe_policy(policy), _kept(sites), without, segment, cost)


def _cost_of(policy: Any) -> str:
    sweeps = getattr(policy, "sweeps", 1)
    return f"each step's forward runs {'once' if sweeps == 1 else f'at most {sweeps} times'} more"


def _kept(sites: Sequence[Site]) -> int:
    return sum(training_of(s).memory().nbytes for s in sites if is_trained(s))


def readable_guard(guard: str, fn: Any = None) -> str:
    """
    >>> readable_guard("0/1: G['__import___main__'].k == 2   # return h * k  # a/cell.py:3 in cell")
    'k == 2, at cell.py:3 in cell'
    """
    condition, *comments = [part.strip() for part in guard.splitlines()[0].split("  # ")]
    condition = readable(re.sub(r"^\d+/\d+: ", "", condition), fn)
    where = comments[-1].partition(" (HINT")[0].rpartition("/")[2] if comments else ""
    return f"{condition}, at {where}" if where else condition


# --- a program ---


def explain_program(
    gm: fx.GraphModule, names: Sequence[str], title: str, limits: Limits | None, kernels: bool
) -> Explanation:
    try:
        scans = tuple(scan_facts(site, limits, kernels) for site in _sites(gm, names))
    except NotCaptured as error:
        return _as_loop(title, error.reason, None, "")
    return Explanation(title, captured=True, scans=scans, limits=limits)


def explain_compiled(
    fn: Callable[..., Any], args: Sequence[Any], title: str, limits: Limits | None, kernels: bool
) -> Explanation:
    """Explain a function or module that was given to ``torch.compile``, captured with ``args``."""
    from torch_scan_hop._torch.dynamo.graph_of_call import capture_graph

    try:
        graph, _, names, _, _ = capture_graph(fn, tuple(args))
    except Exception as error:
        return _as_loop(title, reason_of(error), None, "")
    return explain_program(graph, [readable(n) for n in names], title, limits, kernels)
