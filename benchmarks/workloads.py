"""The workloads: a cell of the tests or one of the issue's, at the issue's sizes.

``jax`` is the same cell for ``jax.lax.scan``; ``module`` the hand-fused kernel, where one exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.cells import GRU, LSTM, Draw, Problem

FLOAT = torch.float32
Cell = Callable[[Any, Any], tuple[Any, Any]]


class Workload:
    """A problem of a given trip count, its JAX twin and its hand-fused kernel."""

    name: str
    T: int
    reverse = False

    def problem(self, T: int) -> Problem:
        raise NotImplementedError

    def loop_cell(self, problem: Problem) -> Cell:
        """The body as the Python loop runs it: one that holds a scan has a loop there."""
        return problem.combine_fn

    def jax_cell(self, jax: Any, params: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        raise NotImplementedError

    def module(self, params: dict[str, Tensor]) -> Fused | None:
        """The fused module with these parameters, if torch ships one."""
        return None

    def same_bytes(self, case: Case) -> Copies | None:
        """Copies that move the bytes the workload has to move, if it is bound by memory."""
        return None


@dataclass(frozen=True)
class Fused:
    """``nn.LSTM`` or ``nn.GRU``; ``gradients`` in the order and layout of the cell's."""

    name: str
    module: nn.Module
    parameters: list[Tensor]
    gradients: Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Copies:
    forward: Callable[[], object]
    train: Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A problem with what its gradient is taken of, and for."""

    problem: Problem
    wanted: list[Tensor]  # parameters, then xs
    cotangent: Tensor
    loop_cell: Cell
    reverse: bool

    def output(self, results: tuple[Any, Any]) -> Tensor:
        return output_of(results)


def output_of(results: tuple[Any, Any]) -> Tensor:
    """The stacked y, or the last carry of a cell that has none."""
    carry, ys = results
    return tree_leaves(carry)[0] if ys is None else ys


def case(workload: Workload, T: int | None = None) -> Case:
    problem = workload.problem(workload.T if T is None else T)
    xs = [x.requires_grad_() for x in tree_leaves(problem.xs)]
    with torch.no_grad():
        x = torch.utils._pytree.tree_map(lambda x: x[0], problem.xs)
        carry, y = problem.combine_fn(problem.init, x)
    last = tree_leaves(carry)[0]
    shape, dtype = (last.shape, last.dtype) if y is None else ((xs[0].shape[0], *y.shape), y.dtype)
    cotangent = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    wanted = [*problem.params.values(), *xs]
    return Case(problem, wanted, cotangent, workload.loop_cell(problem), workload.reverse)


class LSTMWorkload(Workload):
    name, T = "lstm", 256

    def __init__(self, name: str = "lstm", B: int = 16, D: int = 128, H: int = 128) -> None:
        self.name, self.B, self.D, self.H = name, B, D, H

    def problem(self, T: int) -> Problem:
        return LSTM().problem(FLOAT, T, self.B, self.D, self.H)

    def jax_cell(self, jax: Any, p: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        h, c = carry
        i, f, g, o = jax.numpy.split(x @ p["w"] + h @ p["u"] + p["b"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jax.numpy.tanh(g)
        h = jax.nn.sigmoid(o) * jax.numpy.tanh(c)
        return (h, c), h

    def module(self, params: dict[str, Tensor]) -> Fused:
        m = nn.LSTM(self.D, self.H)
        with torch.no_grad():
            m.weight_ih_l0.copy_(params["w"].t())
            m.weight_hh_l0.copy_(params["u"].t())
            m.bias_ih_l0.copy_(params["b"])
            m.bias_hh_l0.zero_()
        parameters = [m.weight_ih_l0, m.weight_hh_l0, m.bias_ih_l0, m.bias_hh_l0]
        return Fused("nn.LSTM", m, parameters, lambda g: [g[0].t(), g[1].t(), g[2]])


class GRUWorkload(Workload):
    name, T = "gru", 256
    B, D, H = 16, 128, 128

    def problem(self, T: int) -> Problem:
        return GRU().problem(FLOAT, T, self.B, self.D, self.H)

    def jax_cell(self, jax: Any, p: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        x_r, x_z, x_n = jax.numpy.split(x @ p["w"] + p["b"], 3, -1)
        h_r, h_z, h_n = jax.numpy.split(carry @ p["u"], 3, -1)
        r, z = jax.nn.sigmoid(x_r + h_r), jax.nn.sigmoid(x_z + h_z)
        n = jax.numpy.tanh(x_n + r * (h_n + p["b_n"]))
        h = (1 - z) * n + z * carry
        return h, h

    def module(self, params: dict[str, Tensor]) -> Fused:
        m, H = nn.GRU(self.D, self.H), self.H
        with torch.no_grad():
            m.weight_ih_l0.copy_(params["w"].t())
            m.weight_hh_l0.copy_(params["u"].t())
            m.bias_ih_l0.copy_(params["b"])
            m.bias_hh_l0.zero_()[2 * H :] = params["b_n"]
        parameters = [m.weight_ih_l0, m.weight_hh_l0, m.bias_ih_l0, m.bias_hh_l0]
        return Fused("nn.GRU", m, parameters, lambda g: [g[0].t(), g[1].t(), g[2], g[3][2 * H :]])


def recurrence(a: Any) -> Cell:
    """``h = a * h + x``, of torch's tensors or of jax's arrays."""

    def cell(h: Any, x: Any) -> tuple[Any, Any]:
        h = a * h + x
        return h, h

    return cell


class LRUWorkload(Workload):
    """``h = a * h + x``: bound by memory."""

    name, T = "lru", 1024

    def __init__(self, name: str = "lru", N: int = 4096) -> None:
        self.name, self.N = name, N

    def problem(self, T: int) -> Problem:
        draw = Draw(FLOAT)
        a = (1 - 0.5 * torch.rand(self.N, generator=draw.generator)).requires_grad_()
        return Problem(recurrence(a), torch.zeros(self.N), draw.normal(T, self.N), {"a": a})

    def jax_cell(self, jax: Any, p: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        return recurrence(p["a"])(carry, x)

    def same_bytes(self, case: Case) -> Copies:
        """Forward: read x, write h. Backward: read dy and h, write dx."""
        x, dy = case.problem.xs.detach(), case.cotangent
        h = x.clone()
        return Copies(lambda: x.clone(), lambda: (x.clone(), torch.add(dy, h)))


class LayersWorkload(Workload):
    """A deep network: weights as xs."""

    name, T = "layers", 24
    B, D = 64, 256

    def problem(self, T: int) -> Problem:
        draw = Draw(FLOAT)
        w = draw.normal(T, self.D, self.D, scale=self.D**-0.5)

        def cell(h, w):
            return torch.tanh(h @ w), None

        return Problem(cell, draw.normal(self.B, self.D), w, {})

    def jax_cell(self, jax: Any, p: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        return jax.numpy.tanh(carry @ x), None


class SSMWorkload(Workload):
    """``h = a_t * h + b_t``, ``y = <c_t, h>``: a_t, b_t of [B, D, 16], c_t of [B, 16]."""

    name, T = "ssm", 1024
    B, D, N = 4, 512, 16

    def problem(self, T: int) -> Problem:
        make = torch.Generator().manual_seed(0)
        xs = {
            "a": torch.rand(T, self.B, self.D, self.N, generator=make),
            "b": torch.randn(T, self.B, self.D, self.N, generator=make),
            "c": torch.randn(T, self.B, self.N, generator=make),
        }

        def cell(h, x):
            h = x["a"] * h + x["b"]
            return h, (h * x["c"][:, None, :]).sum(-1)

        return Problem(cell, torch.zeros(self.B, self.D, self.N), xs, {})

    def jax_cell(self, jax: Any, p: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        h = x["a"] * carry + x["b"]
        return h, (h * x["c"][:, None, :]).sum(-1)


WORKLOADS: dict[str, Workload] = {
    w.name: w
    for w in (LSTMWorkload(), GRUWorkload(), LRUWorkload(), LayersWorkload(), SSMWorkload())
}

#: The same program as lstm, small enough to run 65,536 steps; for what depends on T alone.
NARROW = LSTMWorkload("narrow lstm", B=2, D=16, H=16)

#: Steps that cost next to nothing; for what a call costs.
NARROW_LRU = LRUWorkload("narrow lru", N=64)

ALL = {w.name: w for w in (*WORKLOADS.values(), NARROW, NARROW_LRU)}
