"""The workloads of the tests: cells as a user writes them, with inputs and parameters.

Each cell gives a :class:`Problem` for a dtype, a trip count and a batch size. Values are drawn
in float64 and cast, so that problems of different dtypes are the same problem.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Problem:
    combine_fn: Callable[[Any, Any], tuple[Any, Any]]
    init: Any
    xs: Any
    params: dict[str, Tensor]


class Draw:
    """Random tensors of one dtype from one seed."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(*shape, dtype=torch.float64, generator=self.generator)
        return (values * scale).to(self.dtype)

    def weight(self, *shape: int) -> Tensor:
        return self.normal(*shape, scale=shape[0] ** -0.5).requires_grad_()


class TanhRNN:
    def problem(self, dtype: torch.dtype, T: int, B: int, D: int = 3, H: int = 4) -> Problem:
        draw = Draw(dtype)
        w, u, b = draw.weight(D, H), draw.weight(H, H), draw.weight(H)

        def cell(h, x):
            h = torch.tanh(x @ w + h @ u + b)
            return h, h

        return Problem(
            cell, torch.zeros(B, H, dtype=dtype), draw.normal(T, B, D), {"w": w, "u": u, "b": b}
        )


def lstm_cell(w, u, b):
    def cell(state, x):
        h, c = state
        i, f, g, o = (x @ w + h @ u + b).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return (h, c), h

    return cell


class LSTM:
    def problem(self, dtype: torch.dtype, T: int, B: int, D: int = 3, H: int = 4) -> Problem:
        draw = Draw(dtype)
        w, u, b = draw.weight(D, 4 * H), draw.weight(H, 4 * H), draw.weight(4 * H)

        zeros = torch.zeros(B, H, dtype=dtype)
        cell = lstm_cell(w, u, b)
        return Problem(cell, (zeros, zeros.clone()), draw.normal(T, B, D), {"w": w, "u": u, "b": b})


class GRU:
    def problem(self, dtype: torch.dtype, T: int, B: int, D: int = 3, H: int = 4) -> Problem:
        draw = Draw(dtype)
        w, u = draw.weight(D, 3 * H), draw.weight(H, 3 * H)
        b, b_n = draw.weight(3 * H), draw.weight(H)

        def cell(h, x):
            x_r, x_z, x_n = (x @ w + b).chunk(3, -1)
            h_r, h_z, h_n = (h @ u).chunk(3, -1)
            r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
            n = torch.tanh(x_n + r * (h_n + b_n))
            h = (1 - z) * n + z * h
            return h, h

        params = {"w": w, "u": u, "b": b, "b_n": b_n}
        return Problem(cell, torch.zeros(B, H, dtype=dtype), draw.normal(T, B, D), params)


class ModuleLSTMCell:
    """``nn.LSTMCell`` as it comes."""

    def problem(self, dtype: torch.dtype, T: int, B: int, D: int = 3, H: int = 4) -> Problem:
        draw = Draw(dtype)
        module = nn.LSTMCell(D, H, dtype=dtype)
        for p in module.parameters():
            p.data.copy_(draw.normal(*p.shape, scale=H**-0.5))

        def cell(state, x):
            h, c = module(x, state)
            return (h, c), h

        zeros = torch.zeros(B, H, dtype=dtype)
        params = dict(module.named_parameters())
        return Problem(cell, (zeros, zeros.clone()), draw.normal(T, B, D), params)


class LinearRecurrence:
    """``h = a * h + x``: pointwise, memory-bound, and linear."""

    def problem(self, dtype: torch.dtype, T: int, B: int, D: int = 3, H: int = 4) -> Problem:
        draw = Draw(dtype)
        a = draw.weight(H)

        def cell(h, x):
            h = a * h + x
            return h, h

        return Problem(cell, draw.normal(B, H).requires_grad_(), draw.normal(T, B, H), {"a": a})


class StackedLayers:
    """Weights as xs: a deep network, and nothing to stack."""

    def problem(self, dtype: torch.dtype, T: int, B: int, D: int = 3, H: int = 4) -> Problem:
        draw = Draw(dtype)
        layers = {"w": draw.weight(T, H, H), "b": draw.weight(T, H)}

        def cell(h, layer):
            return torch.tanh(h @ layer["w"] + layer["b"]), None

        return Problem(cell, draw.normal(B, H), layers, {})


class TransformerBlocks:
    """Pre-norm attention and MLP; one block's weights per step."""

    def problem(self, dtype: torch.dtype, T: int, B: int, D: int = 4, H: int = 4) -> Problem:
        draw = Draw(dtype)
        layers = {
            "qkv": draw.weight(T, H, 3 * H),
            "out": draw.weight(T, H, H),
            "up": draw.weight(T, H, 2 * H),
            "down": draw.weight(T, 2 * H, H),
            "norm": draw.weight(T, 2, H),
        }

        def cell(h, p):
            q, k, v = (F.layer_norm(h, (H,), p["norm"][0]) @ p["qkv"]).chunk(3, -1)
            scores = (q @ k.transpose(-1, -2)) * H**-0.5
            h = h + torch.softmax(scores, -1) @ v @ p["out"]
            h = h + F.gelu(F.layer_norm(h, (H,), p["norm"][1]) @ p["up"]) @ p["down"]
            return h, None

        return Problem(cell, draw.normal(B, 5, H), layers, {})


class SelectiveSSM:
    """Input-dependent decay and gates, as in Mamba; xs is a dict."""

    def problem(self, dtype: torch.dtype, T: int, B: int, D: int = 3, H: int = 4) -> Problem:
        draw = Draw(dtype)
        log_a, dt_w = draw.weight(D, H), draw.weight(D)
        xs = {"u": draw.normal(T, B, D), "b": draw.normal(T, B, H), "c": draw.normal(T, B, H)}

        def cell(h, x):
            dt = F.softplus(x["u"] * dt_w)[..., None]
            h = torch.exp(-dt * torch.exp(log_a)) * h + dt * x["b"][:, None, :] * x["u"][..., None]
            return h, (h * x["c"][:, None, :]).sum(-1)

        return Problem(cell, torch.zeros(B, D, H, dtype=dtype), xs, {"log_a": log_a, "dt_w": dt_w})


CELLS: dict[str, Any] = {
    "tanh_rnn": TanhRNN(),
    "lstm": LSTM(),
    "gru": GRU(),
    "lstm_cell_module": ModuleLSTMCell(),
    "linear_recurrence": LinearRecurrence(),
    "stacked_layers": StackedLayers(),
    "transformer": TransformerBlocks(),
    "selective_ssm": SelectiveSSM(),
}


class NamedState(NamedTuple):
    h: Any
    c: Any


@dataclass
class StateOfFields:
    h: Any
    c: Any


#: what makes a state of two tensors, and what takes it apart
STATES: dict[str, tuple[Any, Any]] = {
    "tuple": (lambda h, c: (h, c), lambda state: state),
    "dict": (lambda h, c: {"h": h, "c": c}, lambda state: (state["h"], state["c"])),
    "named tuple": (NamedState, tuple),
    "dataclass": (StateOfFields, lambda state: (state.h, state.c)),
}
