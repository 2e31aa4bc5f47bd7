"""A stack of layers run in each way, and what comes of it."""

from __future__ import annotations

import copy
import functools

import torch

from torch_scan_hop import scan_layers


def in_sequence(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def _compiled(backend, layers, x):
    torch._dynamo.reset()
    return torch.compile(scan_layers, backend=backend, fullgraph=True)(layers, x)


def calls(backend):
    """Eager and compiled."""
    return [scan_layers, functools.partial(_compiled, backend)]


def results(call, layers, x, times=1):
    """Of a copy of ``layers``: what they return, all gradients, and the buffers after it."""
    layers = copy.deepcopy(layers)
    x = x.clone().requires_grad_()
    outs = [call(layers, x) for _ in range(times)]
    torch.stack(outs).square().sum().backward()
    return [*outs, x.grad, *(p.grad for p in layers.parameters()), *layers.buffers()]
