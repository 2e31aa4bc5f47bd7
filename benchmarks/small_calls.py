"""Small compiled calls, as reinforcement learning and control have them: what a call costs.

python -m benchmarks.small_calls
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.page import Page
from benchmarks.timing import interleaved
from torch_scan_hop import scan, tree

ROUNDS = 301

ABOUT = [
    "Medians in microseconds, one thread; contestants take turns. `floor` is a program without a",
    "scan, compiled by `torch.compile` for the same arguments: it adds the xs up. Targets:",
    "forward 30, training 100.",
    "",
]

#: a combine_fn, init and xs, and whether the scan goes backwards
Program = tuple[Callable[..., Any], Any, Any, bool]


def gae() -> Program:
    def step(advantage: Tensor, x: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        reward, value, following, alive = x
        advantage = reward + 0.99 * following * alive - value + 0.94 * alive * advantage
        return advantage, advantage

    rewards, values, following = (torch.randn(128, 64) for _ in range(3))
    return step, torch.zeros(64), (rewards, values.requires_grad_(), following,
                                   (torch.rand(128, 64) > 0.1).float()), True  # fmt: skip


def v_trace() -> Program:
    def step(total: Tensor, x: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        ratio, delta, discount = x
        total = delta * ratio + discount * ratio.clamp(max=1.0) * total
        return total, total

    deltas = torch.randn(128, 64, requires_grad=True)
    return step, torch.zeros(64), (torch.rand(128, 64), deltas, torch.full((128, 64), 0.99)), True


def td_lambda() -> Program:
    def step(target: Tensor, x: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        reward, value = x
        target = reward + 0.99 * (0.1 * value + 0.9 * target)
        return target, target

    values = torch.randn(200, 16, requires_grad=True)
    return step, torch.zeros(16), (torch.randn(200, 16), values), True


def pid_controller() -> Program:
    def step(carry: tuple[Tensor, ...], wanted: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        y, integral, before = carry
        error = wanted - y
        integral = integral + 0.01 * error
        y = y + 0.1 * (0.5 * error + 0.1 * integral + 0.05 * (error - before) - y)
        return (y, integral, error), y

    return step, (torch.zeros(32),) * 3, torch.randn(200, 32, requires_grad=True), False


def cart_pole() -> Program:
    def step(state: tuple[Tensor, ...], force: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        x, speed, angle, turning = state
        sin, cos = angle.sin(), angle.cos()
        push = (10 * force + 0.05 * turning * turning * sin) / 1.1
        bend = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos * cos / 1.1))
        rate = push - 0.05 * bend * cos / 1.1
        x, angle = x + 0.02 * speed, angle + 0.02 * turning
        state = (x, speed + 0.02 * rate, angle, turning + 0.02 * bend)
        return state, torch.stack(state, -1)

    return step, (torch.full((64,), 0.05),) * 4, torch.randn(100, 64, requires_grad=True), False


PROGRAMS = {f.__name__: f for f in (gae, v_trace, td_lambda, pid_controller, cart_pole)}


def measure(name: str) -> list[list[object]]:
    torch.set_num_threads(1)
    step, init, xs, reverse = PROGRAMS[name]()

    def scanned(init: Any, xs: Any, **options: Any) -> Any:
        return scan(step, init, xs, reverse=reverse, **options)[1]

    (wanted,) = (leaf for leaf in tree.tensors(xs) if leaf.requires_grad)
    cotangent = torch.randn_like(scanned(init, xs))

    def floor(init: Any, xs: Any) -> Any:
        more = sum(leaf.detach() for leaf in tree.tensors(xs))
        return cotangent + (wanted + more).reshape(wanted.shape + (1,) * (cotangent.ndim - 2))

    ways: dict[str, Callable[..., Any]] = {
        "floor": torch.compile(floor, fullgraph=True),
        "torch.compile": torch.compile(scanned, fullgraph=True),
        "compile=True": functools.partial(scanned, compile=True),
    }

    def forward(run: Callable[..., Any]) -> None:
        with torch.no_grad():
            run(init, xs)

    def train(run: Callable[..., Any]) -> None:
        wanted.grad = None
        run(init, xs).backward(cotangent)

    rows: list[list[object]] = []
    for kind, how in (("forward", forward), ("training", train)):
        calls = {way: functools.partial(how, run) for way, run in ways.items()}
        for each in (*calls.values(), *calls.values()):
            each()
        us = [1000 * t.median for t in interleaved(calls, ROUNDS).values()]
        rows.append([name, kind, *(f"{each:.0f}" for each in us)])
    return rows


def main() -> None:
    page = Page("Small compiled calls", "small_calls")
    lines = [row for name in PROGRAMS for row in page.measured("measure", name, limit=300)]
    head = ["program", "", "floor", "torch.compile", "compile=True"]
    page.write([*ABOUT, *report.table(head, lines)])


if __name__ == "__main__":
    main()
