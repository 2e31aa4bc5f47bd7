"""Take apart the cells that torch runs as one operator on a GPU.

On a CPU ``nn.LSTMCell`` and ``nn.GRUCell`` are products and pointwise work. On a GPU torch does
that work by an operator of its own, forward and backward, which a kernel of ours cannot contain.
Taken apart, the whole scan is one kernel. In eager mode the operator stays, since it is one launch
instead of ten.

The backward reads the operator's ``workspace``, rows of gates side by side, which the parts keep as
it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from torch_scan_hop.inductor.inline import write_in_parts

aten = torch.ops.aten


def _parts(gates: Tensor, bias: Tensor | None, count: int) -> Any:
    return (gates if bias is None else gates + bias).chunk(count, -1)


def _lstm(
    of_input: Tensor,
    of_hidden: Tensor,
    c: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> Any:
    """Return ``(h', c', workspace)``; the workspace is the gates i, f, g, o."""
    parts = zip(_parts(of_input, input_bias, 4), _parts(of_hidden, hidden_bias, 4), strict=True)
    i, f, g, o = (x + h for x, h in parts)
    i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
    c = f * c + i * g
    return o * torch.tanh(c), c, torch.cat([i, f, g, o], -1)


def _lstm_backward(
    h_grad: Tensor | None,
    c_grad: Tensor | None,
    c: Tensor,
    next_c: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> Any:
    """Return ``(gradient of the gates, of c, of each bias)``."""
    if h_grad is None and c_grad is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, -1)
    tanh = torch.tanh(next_c)
    through_c = torch.zeros_like(c) if c_grad is None else c_grad
    of_o = torch.zeros_like(o)
    if h_grad is not None:
        through_c = through_c + h_grad * o * (1 - tanh * tanh)
        of_o = h_grad * tanh * (1 - o) * o
    of_i = through_c * g * (1 - i) * i
    of_f = through_c * c * (1 - f) * f
    of_g = through_c * i * (1 - g * g)
    gates = torch.cat([of_i, of_f, of_g, of_o], -1)
    return gates, through_c * f, gates.sum(0) if has_bias else None


def _gru(
    of_input: Tensor,
    of_hidden: Tensor,
    h: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> Any:
    """Return ``(h', workspace)``: the gates r, z, n, then h, and the hidden part of n."""
    x_r, x_z, x_n = _parts(of_input, input_bias, 3)
    h_r, h_z, h_n = _parts(of_hidden, hidden_bias, 3)
    r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
    n = torch.tanh(x_n + r * h_n)
    return n + z * (h - n), torch.cat([r, z, n, h, h_n], -1)


def _gru_backward(h_grad: Tensor, workspace: Tensor, has_bias: bool) -> Any:
    """Return ``(gradients of the input's gates, of the hidden ones, of h, of either bias)``."""
    r, z, n, h, h_n = workspace.chunk(5, -1)
    of_z = h_grad * (h - n) * (1 - z) * z
    of_n = h_grad * (1 - z) * (1 - n * n)
    of_r = of_n * h_n * (1 - r) * r
    of_input = torch.cat([of_r, of_z, of_n], -1)
    of_hidden = torch.cat([of_r, of_z, of_n * r], -1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, h_grad * z, *biases


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten._thnn_fused_lstm_cell.default: _lstm,
    aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_backward,
    aten._thnn_fused_gru_cell.default: _gru,
    aten._thnn_fused_gru_cell_backward.default: _gru_backward,
}


def write_fused_cells(body: fx.GraphModule) -> None:
    """Write each such operator of ``body`` in parts."""
    if any(node.target in DECOMPOSITIONS for node in body.graph.nodes):
        write_in_parts(body, DECOMPOSITIONS, "write_fused_cells")
