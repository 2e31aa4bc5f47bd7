"""Source-to-source reverse mode: the VJP of a function as an FX graph that a person can read.

>>> import torch
>>> from torch_scan_hop import vjp
>>> def foo(x):
...     return vjp.scale(torch.sin(torch.trace(x)), x)
>>> print(vjp.readable(vjp.vjp_graph(foo, torch.ones(3, 3))))
def forward(self, x, d_out):
    trace = torch.trace(x)
    sin = torch.sin(trace)
    scale = torch_scan_hop_vjp_scale(sin, x)
    mul = d_out * x
    d_sin = torch.sum(mul)
    scale_1 = torch_scan_hop_vjp_scale(sin, d_out)
    cos = torch.cos(trace)
    d_trace = d_sin * cos
    expand = d_trace.expand(3)
    diag = torch.diag(expand)
    d_x = scale_1 + diag
    return (scale, (d_x,))

A rule says what the forward saves for the backward. Which one is right depends on what memory and
time cost, so rules are a table that the user may change:

>>> rules = vjp.DEFAULT_RULES.override({torch.sin: vjp.sin_saving_cos})
>>> forward, backward = vjp.forward_and_backward(torch.sin, torch.ones(3), rules=rules)
>>> print(vjp.readable(backward))
def forward(self, cos, d_out):
    d_arg_0 = d_out * cos
    return (d_arg_0,)

Nothing here goes through autograd, which makes it an oracle for gradients computed by it. Read on
in `transform` (the chain rule), `rules/` (the table), `tracing` (shapes without data).
"""

from .primitives import primitive, scale, unindex
from .rules import DEFAULT_RULES
from .rules.alternatives import sin_saving_cos, sin_saving_x, strict_add, strict_mul, sum_saving_x
from .shapes import ndim, shape, unbroadcast, value
from .table import MissingRule, Rule, RuleTable
from .transform import ForwardBackward, forward_and_backward, readable, vjp_graph

__all__ = [
    "DEFAULT_RULES",
    "ForwardBackward",
    "MissingRule",
    "Rule",
    "RuleTable",
    "forward_and_backward",
    "ndim",
    "primitive",
    "readable",
    "scale",
    "shape",
    "sin_saving_cos",
    "sin_saving_x",
    "strict_add",
    "strict_mul",
    "sum_saving_x",
    "unbroadcast",
    "unindex",
    "value",
    "vjp_graph",
]
