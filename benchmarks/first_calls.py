"""What the first call of a cell takes: processor time, and the instructions that Dynamo traces.

    python -m benchmarks.first_calls

An LSTM's cell (B=2, H=4, T=5), whose state is a tuple, a dict, a named tuple, a dataclass or in
attributes of a module, new in each call; Dynamo is imported, and has captured such a cell before.
Medians of ``ROUNDS`` calls, the states in turns, one process for each way, one thread. Compiled
means traced by ``torch.compile`` with its backend "eager", so that no compiler's time is in it.
To compare two commits, run it in a worktree of each.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from benchmarks import report
from benchmarks.page import Page
from tests.cells import STATES
from torch_scan_hop import scan

ROUNDS = 15
WAYS = ("forward", "training", "compiled")


class Remembering(torch.nn.Module):
    """A cell that keeps its state in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.LSTMCell(4, 4)
        self.h, self.c = torch.zeros(2, 4), torch.zeros(2, 4)

    def forward(self, count: Any, x: torch.Tensor) -> Any:
        self.h, self.c = self.cell(x, (self.h, self.c))
        return count, self.h


def _new(state: str) -> tuple[Any, Any]:
    """Return a cell whose code no capture has seen, and its init."""
    if state == "attributes":
        return Remembering(), torch.zeros(1)
    made, parts = STATES[state]
    code: dict[str, Any] = {}
    exec(
        "def new(cell, made, parts):\n"
        "    def body(state, x):\n"
        "        h, c = cell(x, parts(state))\n"
        "        return made(h, c), made(h, None)\n"
        "    return body\n",
        code,
    )
    body = code["new"](torch.nn.LSTMCell(4, 4), made, parts)
    return body, made(torch.zeros(2, 4), torch.zeros(2, 4))


def _seconds(way: str, state: str) -> float:
    torch._dynamo.reset()
    body, init = _new(state)
    xs = torch.randn(5, 2, 4, requires_grad=way == "training")
    run = torch.compile(scan, backend="eager", fullgraph=True) if way == "compiled" else scan
    start = time.process_time()
    ys = run(body, init, xs)[1]
    if way == "training":
        (ys if isinstance(ys, torch.Tensor) else STATES[state][1](ys)[0]).sum().backward()
    return time.process_time() - start


def measure(way: str) -> dict[str, tuple[float, int]]:
    """Milliseconds of a first call and the instructions that it traces, by state."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase as Translator

    torch.set_num_threads(1)
    states = [*STATES, "attributes"]
    traced, step, found = dict.fromkeys(states, 0), Translator.step, {s: [] for s in states}
    for state in states:

        def counted(self: Any, state: str = state) -> bool:
            traced[state] += 1
            return step(self)

        _seconds(way, state)
        Translator.step = counted
        _seconds(way, state)
        Translator.step = step
    for _ in range(ROUNDS):
        for state in states:
            found[state].append(1e3 * _seconds(way, state))
    return {state: (statistics.median(found[state]), traced[state]) for state in states}


def main() -> None:
    page = Page("First calls of a cell", "first_calls")
    found = {way: page.measured("measure", way) for way in WAYS}
    rows = [
        [state, *(cell for way in WAYS for cell in _cells(*found[way][state]))]
        for state in found["forward"]
    ]
    head = ["state", *(cell for way in WAYS for cell in (f"{way}, ms", "instructions"))]
    page.write(report.table(head, rows))


def _cells(milliseconds: float, traced: int) -> tuple[str, str]:
    return f"{milliseconds:.0f}", f"{traced:,}"


if __name__ == "__main__":
    main()
