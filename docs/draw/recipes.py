"""What recipes of the cookbook compute, drawn. A picture is shown on the page of its recipe."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch

from docs.draw.svg import CARRY, DARK, GREY, XS, YS, Axes, Drawing, path

F64 = torch.float64
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "cookbook"))


def recipe(name: str) -> Any:
    return importlib.import_module(name)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def cells(grid: list[list[int]], left: float, top: float, size: float) -> str:
    """One path of all squares that are alive, runs of them in one."""
    found = []
    for y, row in enumerate(grid):
        x = 0
        while x < len(row):
            run = 0
            while x + run < len(row) and row[x + run]:
                run += 1
            if run:
                wide = run * size
                found.append(f"M{left + x * size:g},{top + y * size:g}h{wide:g}v{size:g}h-{wide}z")
            x += max(1, run)
    return "".join(found)


def cellular_automaton() -> Drawing:
    drawing = Drawing(780, 292, "40 generations of rule 110, and a glider in the game of life")
    module = recipe("cellular_automaton")
    row = torch.randint(2, (82,), generator=torch.Generator().manual_seed(0))
    rows, boards = module.with_scan(row, module.inputs()[1])
    drawing.text(20, 28, "rule 110: a row is a step's y, time goes down")
    drawing.fill(cells(rows.tolist(), 20, 40, 6), CARRY)
    drawing.text(540, 28, "life: a board is a step's y")
    for k, t in enumerate((0, 4, 8, 12)):
        left, top = 540 + 116 * (k % 2), 40 + 124 * (k // 2)
        drawing.box(left, top, 96, 96, GREY)
        drawing.fill(cells(boards[t].tolist(), left, top, 8), YS)
        drawing.text(left + 48, top + 112, f"t = {t}", GREY, "middle", 11)
    return drawing


def spiking_net() -> Drawing:
    drawing = Drawing(780, 280, "The potential of a neuron, which falls when it fires, and spikes")
    module = recipe("spiking_net")
    currents, w, u = randn(60, 1, 5, seed=1), randn(5, 8, seed=2) * 0.5, randn(8, 8, seed=3) * 0.3
    spikes, potentials = module.with_scan(currents, w, u)
    spikes, potentials = spikes[:, 0], potentials[:, 0]
    neuron = int(spikes.sum(0).argmax())
    low, high = float(potentials[:, neuron].min()), float(potentials[:, neuron].max())
    axes = Axes(drawing, (40, 36, 720, 110), (0, 59), (low, high))
    drawing.text(20, 24, "the carry of one neuron: its potential, which falls after it has fired")
    drawing.line([axes.at(0, 1), axes.at(59, 1)], GREY, 1, "4 4")
    drawing.text(760, axes.at(0, 1)[1] - 4, "threshold", GREY, "end", 11)
    axes.curve(potentials[:, neuron].tolist(), CARRY)
    drawing.text(20, 172, "ys: the spikes of all 8 neurons")
    for t, n in spikes.nonzero().tolist():
        x, y = axes.at(t, 0)[0], 184 + 10 * n
        drawing.line([(x, y), (x, y + 8)], YS if n == neuron else DARK, 2)
    drawing.arrow([(600, 272), (760, 272)], GREY)
    drawing.text(592, 276, "time", GREY, "end", 11)
    return drawing


def kalman() -> Drawing:
    module, T = recipe("kalman"), 60
    a, c = torch.tensor([[1, 0.2], [0, 1]], dtype=F64), torch.tensor([[1.0, 0]], dtype=F64)
    q, r = torch.zeros(2, 2, dtype=F64), torch.tensor([[8.0]], dtype=F64)  # their noise: I, I + 64
    noise, state, truth = randn(T, 2), torch.zeros(2, dtype=F64), []
    for t in range(T):
        state = a @ state + noise[t]
        truth.append(float(state[0]))
    ys = torch.tensor(truth, dtype=F64)[:, None, None] + 65**0.5 * randn(T, 1, 1, seed=1)
    eye = torch.eye(2, dtype=F64)
    filtered, at = [], (torch.zeros(1, 2, dtype=F64), eye)
    for y in ys:
        *at, _ = module.update(*module.predict(*at, a, eye), y, c, r @ r.T + eye[:1, :1])
        filtered.append(float(at[0][0, 0]))
    _, (means, covs) = module.with_scan(ys, a, c, q, r)
    means, spread = means[:, 0, 0], 2 * covs[..., 0, 0].reshape(T - 1, -1)[:, 0].sqrt()
    drawing = Drawing(780, 290, "What was seen, the filtered and the smoothed state, and the truth")
    seen = ys[:, 0, 0].tolist()
    axes = Axes(drawing, (24, 36, 732, 236), (0, T - 1), (min(seen), max(seen)))
    axes.band((means - spread).tolist(), (means + spread).tolist(), CARRY)
    for t, y in enumerate(seen):
        drawing.dot(*axes.at(t, y), 2.5, GREY)
    axes.curve(truth, DARK, 1)
    axes.curve(filtered, YS)
    axes.curve(means.tolist(), CARRY, 2.2)
    _legend(drawing, {"seen": GREY, "truth": DARK, "filtered": YS, "smoothed (2 sigma)": CARRY})
    return drawing


def _legend(drawing: Drawing, entries: dict[str, str]) -> None:
    x = 24
    for name, color in entries.items():
        drawing.line([(x, 18), (x + 18, 18)], color, 3)
        drawing.text(x + 24, 22, name)
        x += 48 + 8 * len(name)


def hmm() -> Drawing:
    module, S, V, T = recipe("hmm"), 4, 6, 14
    stay = 2.0 * torch.eye(S, dtype=F64)
    start, move, emit = randn(S), stay + randn(S, S, seed=1) / 2, 2 * randn(S, V, seed=2)
    seen = torch.randint(V, (T, 1), generator=torch.Generator().manual_seed(3))
    _, best = module.with_scan(seen, start, move, emit)
    drawing = Drawing(780, 250, "The likeliest path through the states, given the symbols seen")
    drawing.text(
        20, 24, "Viterbi: a scan finds the best way into each state, a reversed one reads it"
    )

    def at(t: int, state: int) -> tuple[float, float]:
        return 84 + 50 * t, 54 + 38 * state

    moves = [(at(t, k), at(t + 1, m)) for t in range(T - 1) for k in range(S) for m in range(S)]
    drawing.stroke("".join(map(path, moves)), "#dcdfe5", 0.7)
    states = best[:, 0].tolist()
    drawing.line([at(t, k) for t, k in enumerate(states)], CARRY, 3)
    for t in range(T):
        for k in range(S):
            drawing.dot(*at(t, k), 7, CARRY if states[t] == k else GREY, states[t] == k)
        x = at(t, 0)[0]
        drawing.box(x - 14, 200, 28, 24, XS, "abcdef"[int(seen[t])])
    for k in range(S):
        drawing.text(20, at(0, k)[1] + 4, f"state {k}", GREY, size=11)
    drawing.text(20, 216, "seen", XS, size=11)
    return drawing


def ode() -> Drawing:
    module = recipe("ode")
    turn, w, v = torch.tensor([[0.0, -4], [4, 0]]), torch.eye(4, 8), torch.zeros(8, 4)
    v[:2, :2] = v[2:4, 2:] = turn  # the state goes round and round
    _, states = module.with_scan(randn(3, 4), w.double(), v.double())
    drawing = Drawing(780, 270, "The ODE from three starts, and which states are saved")
    values = states[..., 0]
    axes = Axes(drawing, (24, 40, 732, 190), (0, 63), (float(values.min()), float(values.max())))
    for k, color in enumerate((CARRY, XS, YS)):
        axes.curve(values[:, k].tolist(), color)
        for t in range(7, 63, 8):  # the carry into a segment is the y of the step before
            drawing.dot(*axes.at(t, float(values[t, k])), 4, color)
    drawing.text(
        20, 24, 'dots: the states that checkpoint="sqrt" saves, besides the start; 8 of 64 steps'
    )
    drawing.arrow([(600, 252), (756, 252)], GREY)
    drawing.text(592, 256, "time", GREY, "end", 11)
    return drawing


def gae() -> Drawing:
    module, T, ends = recipe("gae"), 60, (24, 43)
    rewards, done = torch.zeros(T, 1, dtype=F64), torch.zeros(T, 1, dtype=torch.bool)
    for t, reward in ((12, 1.0), (24, -1.0), (36, 1.0), (43, 1.0), (55, 0.6)):
        rewards[t] = reward
    for t in ends:
        done[t] = True
    zeros = torch.zeros(T, 1, dtype=F64)
    advantages, _ = module.with_scan(rewards, zeros, zeros[0], done, zeros)
    drawing = Drawing(780, 300, "Rewards, and the advantages that they give to steps before them")
    above = Axes(drawing, (24, 44, 732, 80), (0, T - 1), (-1.1, 1.1))
    below = Axes(drawing, (24, 160, 732, 110), (0, T - 1), (-1.1, 1.6))
    for axes in (above, below):
        axes.ground()
    for t in range(T):
        (x, y), ground = above.at(t, float(rewards[t])), above.at(t, 0)[1]
        drawing.line([(x, ground), (x, y)], XS, 5) if y != ground else None
    curve = [below.at(t, float(v)) for t, v in enumerate(advantages[:, 0])]
    drawing.fill(path([below.at(0, 0), *curve, below.at(T - 1, 0)]) + "z", YS, 0.18)
    drawing.line(curve, YS, 2)
    for t in ends:
        x = (above.at(t, 0)[0] + above.at(t + 1, 0)[0]) / 2
        drawing.line([(x, 40), (x, 274)], DARK, 1, "4 4")
        drawing.text(x + 5, 284, "the episode ends", GREY, size=11)
    drawing.text(24, 28, "rewards", XS)
    drawing.text(24, 150, "advantages: a reversed scan carries them back, not past an end", YS)
    return drawing


def drawings() -> dict[str, Drawing]:
    made = (cellular_automaton, spiking_net, kalman, hmm, ode, gae)
    with torch.no_grad():
        return {make.__name__: make() for make in made}
