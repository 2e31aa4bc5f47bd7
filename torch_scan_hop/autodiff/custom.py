"""Bodies with a custom ``autograd.Function`` or a hook, which serve one derivative only.

A trace below autograd inlines the function's forward, and differentiates that by torch's own rules.
So the first derivative of such a body is a scan like any other, but a second one goes through a
loop of the body, and functorch transforms run the user's function step by step. A hook is in no
trace of a step with its gradients, but has changed one of them: autograd calls it in the second
derivative, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torch_scan_hop._torch.custom_functions import is_custom_function, with_connected_functions
from torch_scan_hop.body.cache import remember
from torch_scan_hop.body.node_kinds import all_nodes
from torch_scan_hop.capture.hooks import hooks_of, is_scaling
from torch_scan_hop.errors import CUSTOM_FUNCTION_UNDER_TRANSFORM
from torch_scan_hop.op import Body
from torch_scan_hop.reference import scan_loop
from torch_scan_hop.signature import Inputs


def has_custom_function(body: Body) -> bool:
    if not isinstance(body, fx.GraphModule):
        return False
    return remember(
        body, ("custom function",), lambda: any(map(is_custom_function, all_nodes(body)))
    )


def has_own_backward(body: Body) -> bool:
    """Return True if a second derivative of ``body`` must go through a loop of it."""
    return isinstance(body, fx.GraphModule) and (has_custom_function(body) or bool(_hooks(body)))


def _hooks(body: fx.GraphModule) -> list[fx.GraphModule]:
    return remember(body, ("hooks",), lambda: hooks_of(body))


def refuse_custom_function(body: Body) -> None:
    if has_custom_function(body):
        raise RuntimeError(
            f"torch.ops.higher_order.scan: {CUSTOM_FUNCTION_UNDER_TRANSFORM}. Call "
            "torch_scan_hop.scan, which runs such a body step by step."
        )


_HOOK_TWICE = (
    "scan: a body registers a hook (Tensor.register_hook) that does more to a gradient than scale "
    "it, and is differentiated twice for a loss that is not linear in the results of the scan. "
    "Change the gradient in a custom autograd.Function instead."
)


def gradients_of(
    outputs: Sequence[Tensor], cotangents: Sequence[Any], wanted: Sequence[Tensor], **options: bool
) -> tuple[Any, ...]:
    """Return the gradients of ``wanted``; None where no output depends on it."""
    given = zip(outputs, cotangents, strict=True)
    pairs = [(o, c) for o, c in given if c is not None and o.requires_grad]
    if not pairs:
        return (None,) * len(wanted)
    differentiated, weights = zip(*pairs, strict=True)
    return torch.autograd.grad(differentiated, wanted, weights, allow_unused=True, **options)


def gradients_of_loop(
    body: Body, inputs: Inputs[Any], reverse: bool, cotangents: Sequence[Any]
) -> list[Any]:
    """Return for each flat input a differentiable gradient, or None where there is none."""
    assert isinstance(body, fx.GraphModule)
    if any(c is not None and c.requires_grad for c in cotangents):
        # the second derivative comes by a tensor of the loop and by its twin in the scan that ran,
        # and a hook of the one tensor that a program has would see their sum
        if not all(map(is_scaling, _hooks(body))):
            raise RuntimeError(_HOOK_TWICE)
    # other objects than the inputs: one input may have been computed from another
    inputs = inputs.map(lambda v: v.view_as(v) if isinstance(v, Tensor) else v)
    n_carry = inputs.signature.n_carry

    run = remember(body, ("connected functions",), lambda: with_connected_functions(body))

    def step(carry: Any, x: Any) -> Any:
        out = run(*carry, *x, *inputs.additional)
        return list(out[:n_carry]), list(out[n_carry:])

    carry, ys = scan_loop(step, inputs.carry, inputs.xs, inputs.trip_count, reverse)
    flat = inputs.flat()
    wanted = [v for v in flat if isinstance(v, torch.Tensor) and v.requires_grad]
    found = gradients_of([*carry, *ys], cotangents, wanted, create_graph=True)
    by_input = dict(zip(map(id, wanted), found, strict=True))
    return [by_input.get(id(v)) for v in flat]
