"""What becomes of each cell on a GPU: one kernel, launches in each step, or a loop; and why.

``python tests/gpu_table.py [NAME ...]`` writes these rows of ``gpu_table.txt``, or all, which takes
minutes. It needs no GPU, and no build of torch for one: all tensors are fakes.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cells import CELLS
from gpu_cells import CASES, NORM_CASES, ROW_CASES, SQUARE_CASES
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from torch_scan_hop import explain
from torch_scan_hop._torch.fakes import FakeTensorMode
from torch_scan_hop.explain.device import as_if_there
from torch_scan_hop.explain.facts import Kernel

TABLE = Path(__file__).with_suffix(".txt")
RECIPES = Path(__file__).parent.parent / "examples" / "cookbook"
B, H, T = 8, 16, 300

# --- what a GPU user writes first: a module of torch in a step ---


def carried(module: Any, *more: Any) -> Any:
    """A step that carries what ``module`` gives for ``x + carry``."""

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = module(x + h, *more)
        return h, h

    return step


def cell_of(module: nn.Module) -> Any:
    def step(state: Any, x: torch.Tensor) -> Any:
        state = module(x, state)
        return state, state[0] if isinstance(state, tuple) else state

    return step


def made_weight(make: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> Any:
    """A step that makes its weight of others."""
    weights = [torch.randn(shape, requires_grad=True) for shape in shapes]
    return carried(lambda x: torch.tanh(x @ make(*weights)))


def lstm_with_dropout() -> Any:
    cell, drop = nn.LSTMCell(H, H), nn.Dropout(0.2)

    def step(state: Any, x: torch.Tensor) -> Any:
        h, c = cell(drop(x), state)
        return (drop(h), c), h

    return step


def lstm_with_norm() -> Any:
    cell, norm = nn.LSTMCell(H, H), nn.LayerNorm(H)

    def step(state: Any, x: torch.Tensor) -> Any:
        h, c = cell(x, state)
        return (norm(h), c), h

    return step


def lstm_with_norms_of_gates() -> Any:
    of_x, of_h = nn.Linear(H, 4 * H), nn.Linear(H, 4 * H, bias=False)
    norms = nn.LayerNorm(4 * H), nn.LayerNorm(4 * H), nn.LayerNorm(H)

    def step(state: Any, x: torch.Tensor) -> Any:
        h, c = state
        i, f, g, o = (norms[0](of_x(x)) + norms[1](of_h(h))).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(norms[2](c))
        return (h, c), h

    return step


def slstm() -> Any:
    of_x, of_h = nn.Linear(H, 4 * H), nn.Linear(H, 4 * H, bias=False)

    def step(state: Any, x: torch.Tensor) -> Any:
        h, c, n, m = state
        i, f, z, o = (of_x(x) + of_h(h)).chunk(4, -1)
        f = F.logsigmoid(f) + m
        m = torch.maximum(f, i)
        i, f = torch.exp(i - m), torch.exp(f - m)
        c, n = f * c + i * torch.tanh(z), f * n + i
        h = torch.sigmoid(o) * c / n
        return (h, c, n, m), h

    return step


def lstm_in_half() -> Any:
    cell = nn.LSTMCell(H, H)

    def step(state: Any, x: torch.Tensor) -> Any:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            h, c = cell(x, state)
        h, c = h.float(), c.float()
        return (h, c), h

    return step


def gru_with_head() -> Any:
    cell, head = nn.GRUCell(H, H), nn.Linear(H, 7)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = cell(x, h)
        return h, torch.log_softmax(head(h), -1)

    return step


def gru_of_two_layers() -> Any:
    cells = nn.GRUCell(H, H), nn.GRUCell(H, H)

    def step(states: torch.Tensor, x: torch.Tensor) -> Any:
        after = []
        for k, cell in enumerate(cells):
            x = cell(x, states[k])
            after.append(x)
        return torch.stack(after), x

    return step


def lstm_of_one_tensor() -> Any:
    cell = nn.LSTMCell(H, H)

    def step(state: torch.Tensor, x: torch.Tensor) -> Any:
        h, c = cell(x, state.chunk(2, -1))
        return torch.cat([h, c], -1), h

    return step


def average() -> Any:
    def step(state: Any, x: torch.Tensor) -> Any:
        mean, n = state
        mean, n = torch.lerp(mean, x, 0.1), n + 1
        return (mean, n), mean / (1 - 0.9**n)

    return step


def attention() -> Any:
    mixed = nn.MultiheadAttention(H, 2, batch_first=True)
    return carried(lambda x: mixed(x[:, None], x[:, None], x[:, None], need_weights=False)[0][:, 0])


def lookup() -> Any:
    table = nn.Embedding(10, H)
    return carried(lambda x: x + table((x[:, 0].abs() * 3).long().clamp(max=9)))


def convolution() -> Any:
    mixed = nn.Conv1d(1, 1, 3, padding=1)
    return carried(lambda x: mixed(x[:, None])[:, 0])


def added_by_rows() -> Any:
    rows = torch.arange(B)[:, None].expand(B, H)
    return carried(lambda x: x.scatter_add(0, rows, x.tanh()))


MODULES: dict[str, Callable[[], Any]] = {
    "RNNCell": lambda: cell_of(nn.RNNCell(H, H)),
    "GRUCell": lambda: cell_of(nn.GRUCell(H, H)),
    "GRUCell, one row": lambda: cell_of(nn.GRUCell(H, H)),
    "GRUCell, log_softmax of 7 classes": gru_with_head,
    "GRUCells, states of one tensor": gru_of_two_layers,
    "GRUCell without bias": lambda: cell_of(nn.GRUCell(H, H, bias=False)),
    "LSTMCell": lambda: cell_of(nn.LSTMCell(H, H)),
    "LSTMCell, states of one tensor": lstm_of_one_tensor,
    "LSTMCell without bias": lambda: cell_of(nn.LSTMCell(H, H, bias=False)),
    "LSTMCell, then LayerNorm": lstm_with_norm,
    "LSTMCell between dropouts": lstm_with_dropout,
    "LSTMCell, bf16": lstm_in_half,
    "LSTM, LayerNorm of its gates": lstm_with_norms_of_gates,
    "sLSTM": slstm,
    "an average with its bias corrected": average,
    "Linear, tanh": lambda: carried(nn.Sequential(nn.Linear(H, H), nn.Tanh())),
    "a softmax as weight": lambda: made_weight(lambda w: torch.softmax(w, -1), (H, H)),
    "a weight of low rank": lambda: made_weight(torch.matmul, (H, 2), (2, H)),
    "a normed weight": lambda: made_weight(
        lambda v, g: g * v / v.norm(dim=1, keepdim=True), (H, H), (H, 1)
    ),
    "LayerNorm": lambda: carried(nn.LayerNorm(H)),
    "RMSNorm": lambda: carried(nn.RMSNorm(H)),
    "GroupNorm": lambda: carried(nn.GroupNorm(4, H)),
    "BatchNorm1d": lambda: carried(nn.BatchNorm1d(H, track_running_stats=False)),
    "Dropout": lambda: carried(nn.Dropout(0.1)),
    "MultiheadAttention": attention,
    "Embedding": lookup,
    "Conv1d": convolution,
    "softmax": lambda: carried(lambda x: torch.softmax(x, -1)),
    "cumsum": lambda: carried(lambda x: x.cumsum(-1)),
    "sort": lambda: carried(lambda x: x.sort(-1)[0]),
    "scatter_add": added_by_rows,
    "scaled_dot_product_attention": lambda: carried(
        lambda x: F.scaled_dot_product_attention(*[x.view(B, 2, 2, 4)] * 3).reshape(B, H)
    ),
}  # fmt: skip


def of_module(name: str) -> Any:
    rows = 1 if name.endswith("one row") else B
    h = torch.zeros(rows, H)
    count = 4 if name == "sLSTM" else 2 if name.startswith("LSTM") else 1
    init = tuple(h.clone() for _ in range(count)) if count > 1 else h
    init = {
        "an average with its bias corrected": lambda: (h, torch.zeros((), dtype=torch.int64)),
        "GRUCells, states of one tensor": lambda: torch.zeros(2, B, H),
        "LSTMCell, states of one tensor": lambda: torch.zeros(B, 2 * H),
    }.get(name, lambda: init)()
    return MODULES[name](), init, torch.randn(T, rows, H, requires_grad=True)


# --- the cells of the tests, and the recipes ---


def of_cell(name: str) -> Any:
    problem = CELLS[name].problem(torch.float32, T, B)
    return problem.combine_fn, problem.init, problem.xs


def of_case(name: str) -> Any:
    case = (CASES | ROW_CASES | NORM_CASES | SQUARE_CASES)[name]
    with _disable_current_modes(), torch.device("cpu"):
        drawn = case.drawn(T, torch.float32)
        for value in pytree.tree_leaves(drawn):
            if isinstance(value, torch.Tensor):
                value.requires_grad_(value.dtype.is_floating_point)
    init, xs, parameters = on_the_gpu(drawn)
    return lambda c, x: case.step(c, x, parameters), init, xs


def of_recipe(name: str) -> Any:
    """A copy of the recipe's own, whose modules and tensors are fakes."""
    with _disable_current_modes(), torch.device("cpu"):  # some of them are cast as they are made
        spec = importlib.util.spec_from_file_location(f"{name}_on_a_gpu", RECIPES / f"{name}.py")
        recipe = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(recipe)
        inputs = recipe.inputs()
        recipe.with_loop(*inputs)  # torch.distributions remembers what it looked up
    vars(recipe).update({k: on_the_gpu(value) for k, value in vars(recipe).items()})
    return torch.compile(recipe.with_scan), on_the_gpu(inputs)


def on_the_gpu(values: Any) -> Any:
    """The tensors of a tree as fakes of a GPU, of float32 where they are of floats."""

    def fake(value: Any) -> Any:
        if isinstance(value, nn.Module):
            for owner in value.modules():
                owner._parameters.update(pytree.tree_map(fake, owner._parameters))
                owner._buffers.update(pytree.tree_map(fake, owner._buffers))
            return value
        if not isinstance(value, torch.Tensor):
            return value
        dtype = torch.float32 if value.dtype is torch.float64 else value.dtype
        made = torch.empty_strided(value.shape, value.stride(), dtype=dtype)
        return made.requires_grad_(value.requires_grad)

    return pytree.tree_map(fake, values)


KINDS: dict[str, tuple[Callable[[str], Any], list[str]]] = {
    "torch.nn": (of_module, list(MODULES)),
    "cells": (of_cell, list(CELLS)),
    "kernels": (of_case, [*CASES, *ROW_CASES, *NORM_CASES, *SQUARE_CASES]),
    "cookbook": (of_recipe, sorted(p.stem for p in RECIPES.glob("*.py") if p.stem != "compare")),
}
ROWS = [f"{kind}: {name}" for kind, (_, names) in KINDS.items() for name in names]


def row(name: str) -> str:
    """Lines about one cell: of each of its loops, what it is, and why it is no better."""
    kind, _, own = name.partition(": ")
    with as_if_there("cuda"), FakeTensorMode(), torch.device("cuda"):
        found = explain(*KINDS[kind][0](own))
    if not found.captured:
        return f"  a Python loop: {found.reason.splitlines()[0]}"
    lines = []
    for scan in found.scans:
        label = f"{scan.name}, " if len(found.scans) > 1 else ""
        lines += [f"  {label}{kernel.loop}: {outcome(kernel)}" for kernel in scan.kernels]
    return "\n".join(lines)


def outcome(kernel: Kernel) -> str:
    if kernel.launches == "one":
        return kernel.kind
    reasons = [reason for kind, reason in kernel.why_not.items() if "Triton" in kind]
    return "; ".join([kernel.kind, *dict.fromkeys(reasons)])


def read() -> dict[str, str]:
    """The table, by the names of its rows."""
    found: dict[str, str] = {}
    name = ""
    for line in TABLE.read_text().splitlines():
        if line.startswith("  "):
            found[name] = f"{found[name]}\n{line}".lstrip("\n")
        else:
            name = line
            found[name] = ""
    return found


def write(names: Sequence[str]) -> None:
    """Each row anew, as soon as it is known; the others stay."""
    for name in names:
        known = {**(read() if TABLE.exists() else {}), name: row(name)}
        text = "".join(f"{n}\n{known[n]}\n" for n in ROWS if n in known)
        TABLE.write_text(text)


if __name__ == "__main__":
    write(sys.argv[1:] or ROWS)
