"""How much Python calls of an eager scan run: a warm one, which is what small scans cost beyond their
steps, and what Dynamo traces in a first one, instruction by instruction."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
from cells import STATES
from torch._dynamo.symbolic_convert import InstructionTranslatorBase

from torch_scan_hop import legality, scan
from torch_scan_hop.versions import torch_version

#: torch's own included, of which torch before 2.15 makes up to 30 more; 14 ask for tensors on XLA,
#: where torch_xla is loaded
MOST_CALLS = 300 if torch_version() >= (2, 15) else 345


@pytest.mark.torch_version
def test_python_calls_of_a_training_call(monkeypatch):
    monkeypatch.setattr(legality, "check_after_each", None)  # the tests' own
    wx, wh = (torch.randn(8, 8, requires_grad=True) for _ in range(2))

    def cell(h: Any, x: Any) -> Any:
        h = torch.tanh(x @ wx + h @ wh)
        return h, h

    xs, init = torch.randn(16, 4, 8), torch.zeros(4, 8)
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    counted = []
    for _ in range(6):
        calls = 0
        gc.disable()  # what it frees may call Python, too
        sys.setprofile(count)
        try:
            carry, ys = scan(cell, init, xs)
            (carry.sum() + ys.sum()).backward()
        finally:
            sys.setprofile(None)
            gc.enable()
        counted.append(calls)
    assert 100 < min(counted) <= MOST_CALLS


#: without functions of trees at once they are 6,200 on torch 2.9.1, 4,900 on 2.15.0
MOST_INSTRUCTIONS = {"tuple": 900, "dict": 900, "named tuple": 1500, "dataclass": 1700}


@pytest.mark.torch_version
@pytest.mark.parametrize("kind", STATES)
def test_instructions_that_a_first_call_traces(kind, monkeypatch):
    cell, xs = torch.nn.LSTMCell(4, 4), torch.randn(5, 2, 4)
    state, parts = STATES[kind]

    def body(carry: Any, x: Any) -> Any:
        h, c = cell(x, parts(carry))
        return state(h, c), state(h, None)

    traced, step = 0, InstructionTranslatorBase.step

    def count(self: Any) -> bool:
        nonlocal traced
        traced += 1
        return step(self)

    monkeypatch.setattr(InstructionTranslatorBase, "step", count)
    scan(body, state(torch.zeros(2, 4), torch.zeros(2, 4)), xs)
    assert 500 < traced <= MOST_INSTRUCTIONS[kind]
