"""Regions of ``torch.utils.checkpoint`` that a compiler traces (checked on torch 2.9.1, 2.13.0,
2.15.0).

Such a region has a dispatch mode of torch's: one while its forward is traced, another while what
the backward needs of it is. They ask a policy about each operator and leave its answer with the
nodes, by which the partitioner saves or recomputes. (Torch 2.9 has none where the user gave no
policy: nodes have the answer from the graph that Dynamo captured.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch._higher_order_ops import wrap
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.traceback import get_current_meta
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode_temporarily
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
)

_TAG = "recompute"
_MUST_SAVE_RESULTS = "torch_scan_hop.must_save_results"
_POLICY = "torch_scan_hop.policy"

# The policy that torch uses if the user gave none.
_RECOMPUTES_ALL = getattr(wrap, "_always_prefer_recompute", None)


def is_mode_of_checkpoint(mode: Any) -> bool:
    return isinstance(mode, (_CachingTorchDispatchMode, _CachedTorchDispatchMode))


def is_in_region() -> bool:
    """Return True if the trace under way is in a region of ``torch.utils.checkpoint``."""
    tagged = get_current_meta().get(_TAG) is not None
    return tagged or any(map(is_mode_of_checkpoint, _get_current_dispatch_mode_stack()))


def users_policy_in_force() -> Callable[..., Any] | None:
    """Return the user's policy of the innermost region, if the region has one."""
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, _CachingTorchDispatchMode):
            return _users_policy(mode)
        if isinstance(mode, _CachedTorchDispatchMode):
            return mode.storage.get(_POLICY)
    return None


def _users_policy(mode: Any) -> Callable[..., Any] | None:
    return None if mode.policy_fn is _RECOMPUTES_ALL else mode.policy_fn


def save_results(node: fx.Node) -> None:
    """Have the partitioner keep the results of ``node``, which is in a region."""
    node.meta[_MUST_SAVE_RESULTS] = True
    for tagged in (node, *node.users):
        if _TAG in tagged.meta:
            tagged.meta[_TAG] = CheckpointPolicy.MUST_SAVE


def call_as_one_operator(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``op`` below the mode of a checkpoint, which then sees no operator within it.

    If the user has a policy, ``op`` has asked it about the operators within and returns what it
    wants saved, so all results of ``op`` are saved. Otherwise ``op`` is recomputed as a whole.
    """
    with _pop_mode_temporarily() as mode:
        is_forward = isinstance(mode, _CachingTorchDispatchMode)
        policy = _users_policy(mode) if is_forward else None
        before = _n_nodes()
        if policy is None:
            results = mode.__torch_dispatch__(op, (), args, kwargs)
        else:
            mode.storage[_POLICY] = policy
            mode.policy_fn = _must_save
            try:
                results = mode.__torch_dispatch__(op, (), args, kwargs)
            finally:
                mode.policy_fn = policy
    _restore_tags(before)
    return results


def _must_save(*args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def _n_nodes() -> int:
    proxy_mode = get_proxy_mode()
    return 0 if proxy_mode is None else len(proxy_mode.tracer.graph.nodes)


def _restore_tags(n_before: int) -> None:
    """Tag again the nodes whose results must be saved.

    The mode has given its policy's answer to all new nodes, whatever their tags were.
    """
    proxy_mode = get_proxy_mode()
    if proxy_mode is None:
        return
    nodes = list(proxy_mode.tracer.graph.nodes)
    for node in nodes[n_before:]:
        if _MUST_SAVE_RESULTS in node.meta:
            save_results(node)
