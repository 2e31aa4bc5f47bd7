"""Policies that say what the forward may save: ``checkpoint=``, and tags of checkpoints in the
body.

``None``      what backward needs, as the Python loop would
``"full"``    only what cannot be recomputed from carries, xs and closures
a function    ``policy(ctx, op, *args, **kwargs)`` as for
              ``torch.utils.checkpoint.create_selective_checkpoint_contexts``, per operator
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

#: where a body graph keeps its policy, if that is a function
POLICY = "torch_scan_hop.checkpoint"

#: the policy of a scan in a region of ``torch.utils.checkpoint`` that a compiler traces
RECOMPUTED_WHOLE = "recomputed whole"

Policy = None | str | Callable[..., Any]

_RECOMPUTE = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def policy_of(body: Any, checkpoint: Any) -> Policy:
    """Return the policy of a scan of ``body`` called with ``checkpoint=checkpoint``."""
    if checkpoint is not None:
        return checkpoint
    return body.meta.get(POLICY) if isinstance(body, fx.GraphModule) else None


def _decision(policy: Callable[..., Any], node: fx.Node) -> Any:
    context = SelectiveCheckpointContext(is_recompute=False)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    decision = policy(context, node.target, *args, **kwargs)
    if isinstance(decision, bool):
        return CheckpointPolicy.MUST_SAVE if decision else CheckpointPolicy.PREFER_RECOMPUTE
    return decision


def must_save(policy: Policy, producer: Any) -> bool:
    """Return True if a policy function keeps a value that the derivative alone computes, such as
    ``cos x`` for ``sin x``, of which the loop saves ``x``."""
    if not callable(policy) or producer.op != "call_function":
        return False
    return _decision(policy, producer) is CheckpointPolicy.MUST_SAVE


def wants_recompute(policy: Policy, node: fx.Node, producer: Any) -> bool:
    """Return True if backward recomputes ``node``, an output of the operator ``producer``."""
    tag = node.meta.get("recompute", producer.meta.get("recompute"))
    if tag in _RECOMPUTE:
        return True
    if policy is None or producer.op != "call_function":
        return False
    if policy == "full":
        return True
    assert callable(policy)
    return _decision(policy, producer) in _RECOMPUTE
