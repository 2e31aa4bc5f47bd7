"""What an untraceable body costs beside the loop by hand, and what a new size or number costs.

    python -m benchmarks.loops_and_captures

Loops: the second call of a body that cannot be traced (it appends to a list), against the loop
that a person writes (``xs[t]``, a list of ys, ``torch.stack``), interleaved, one thread.
Captures: the first call, and the third with another batch size, trip count or closed-over float,
in eager training of an LSTM cell, beside a call that needs no work; one run each, in ms.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import report
from benchmarks.page import Page
from benchmarks.timing import interleaved
from torch_scan_hop import fallback, scan

ROUNDS = 41
SIZES = [(8, 16, 20), (32, 64, 100), (64, 256, 100)]
LOG: list[int] = []


def _by_hand(step: Any, carry: Any, xs: torch.Tensor) -> Any:
    ys = []
    for t in range(len(xs)):
        carry, y = step(carry, xs[t])
        ys.append(y)
    return carry, torch.stack(ys)


def _rnn(width: int) -> tuple[Any, list[torch.Tensor]]:
    w, u = (torch.randn(width, width) * width**-0.5 for _ in range(2))

    def step(h: Any, x: torch.Tensor) -> Any:
        LOG.append(1)
        h = torch.tanh(x @ w + h @ u)
        return h, h

    return step, [w, u]


def _lstm(width: int) -> tuple[Any, list[torch.Tensor]]:
    w, u = (torch.randn(width, 4 * width) * width**-0.5 for _ in range(2))

    def step(state: Any, x: torch.Tensor) -> Any:
        LOG.append(1)
        h, c = state
        i, f, g, o = (x @ w + h @ u).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return (h, c), h

    return step, [w, u]


def _train(run: Callable[[], Any], weights: list[torch.Tensor]) -> Callable[[], None]:
    def call() -> None:
        carry, ys = run()
        last = carry if isinstance(carry, torch.Tensor) else carry[0]
        torch.autograd.grad(last.sum() + ys.sum(), weights)

    return call


def _forward(run: Callable[[], Any], weights: list[torch.Tensor]) -> Callable[[], None]:
    def call() -> None:
        with torch.no_grad():
            run()

    return call


def loops() -> list[list[str]]:
    torch.set_num_threads(1)
    rows = []
    with fallback("allow"):
        for name, make in (("rnn", _rnn), ("lstm", _lstm)):
            for batch, width, T in SIZES:
                rows.append(_loop_row(name, make, batch, width, T))
    return rows


def _loop_row(name: str, make: Any, batch: int, width: int, T: int) -> list[str]:
    step, weights = make(width)
    xs, h = torch.randn(T, batch, width), torch.zeros(batch, width)
    init = h if name == "rnn" else (h, h)
    for weight in weights:
        weight.requires_grad_()
    row = [f"{name} B={batch} H={width} T={T}"]
    for wrap, with_xs in ((_forward, False), (_train, False), (_train, True)):
        wanted = [*weights, xs.requires_grad_()] if with_xs else weights
        calls = {
            "by hand": wrap(lambda: _by_hand(step, init, xs), wanted),
            "scan": wrap(lambda: scan(step, init, xs), wanted),
        }
        for call in calls.values():
            call(), call()
        found = interleaved(calls, ROUNDS)
        ratio = found["scan"].median / found["by hand"].median
        row += [f"{found['by hand'].median:.2f}", f"{ratio:.2f}"]
    return row


def captures() -> dict[str, list[float]]:
    """Milliseconds of the first, second and third call with a new value, and of one seen before."""
    torch.set_num_threads(1)
    return {
        "trip count": _times(lambda T: _call(T=int(T)), [20, 30, 40]),
        "batch size": _times(lambda B: _call(B=int(B)), [8, 12, 16]),
        "closed-over float": _times(lambda f: _call(temperature=f), [1.1, 1.2, 1.3]),
    }


def _times(call: Callable[[float], None], values: list[float]) -> list[float]:
    found = []
    torch._dynamo.reset()
    global _step
    _step = _new_step()
    for value in (*values, values[-1]):
        start = time.perf_counter()
        call(value)
        found.append(1e3 * (time.perf_counter() - start))
    return found


def _new_step() -> Any:
    """A function of its own code: what was captured of another says nothing of it."""
    code: dict[str, Any] = {"torch": torch, "__name__": __name__}
    exec(
        "def make(w, u, temperature):\n"
        "    def step(state, x):\n"
        "        h, c = state\n"
        "        i, f, g, o = (x @ w + h @ u).chunk(4, -1)\n"
        "        c = torch.sigmoid(f * temperature) * c + torch.sigmoid(i) * torch.tanh(g)\n"
        "        h = torch.sigmoid(o) * torch.tanh(c)\n"
        "        return (h, c), h\n"
        "    return step\n",
        code,
    )
    return code["make"]


_step: Any = None
H = 64
W, U = (torch.randn(H, 4 * H) * H**-0.5 for _ in range(2))


def _call(T: int = 20, B: int = 8, temperature: float = 1.1) -> None:
    w, u = W.requires_grad_(), U.requires_grad_()
    h = torch.zeros(B, H)
    _, ys = scan(_step(w, u, temperature), (h, h), torch.randn(T, B, H))
    torch.autograd.grad(ys.sum(), [w, u])


def main() -> None:
    page = Page("Loops and captures", "loops_and_captures")
    rows, times = page.measured("loops"), page.measured("captures")
    loops_head = ["", "forward, ms", "scan", "train, ms", "scan", "train with xs, ms", "scan"]
    page.write(
        [
            "## A body that cannot be traced, against the loop by hand",
            "",
            "Milliseconds of the loop by hand, and the scan's over them (target: 1.05).",
            "",
            *report.table(loops_head, rows),
            "## Eager training of an LSTM cell with new values, ms",
            "",
            *report.table(
                ["new", "first call", "second value", "third value", "third value again"],
                [[name, *(f"{ms:.1f}" for ms in values)] for name, values in times.items()],
            ),
        ]
    )


if __name__ == "__main__":
    main()
