"""Cells for the Triton kernels: each a step of ``(carry, x, parameters)``, with all it is given."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from torch_scan_hop import scan
from torch_scan_hop.reference import scan_loop


@dataclass(frozen=True)
class Case:
    """``inputs(T)`` gives init, xs and parameters, in float64 where they are floating point."""

    step: Callable[[Any, Any, Any], Any]
    inputs: Callable[[int], tuple[Any, Any, Any]]

    def run(self, init: Any, xs: Any, parameters: Any, reverse: bool = False) -> Any:
        return scan(lambda c, x: self.step(c, x, parameters), init, xs, reverse=reverse)

    def loop_with(self, draws: Any, exact: Any, T: int, reverse: bool) -> Any:
        """The loop of a step that is given what it else draws, on the ``exact`` inputs."""
        init, xs, parameters = exact

        def step(carry: Any, x: Any) -> Any:
            return self.step(carry, x[0], parameters, x[1])  # type: ignore[call-arg]

        return scan_loop(step, init, (xs, draws), T, reverse)

    def drawn(self, T: int, dtype: torch.dtype) -> tuple[Any, Any, Any]:
        def cast(value: torch.Tensor) -> torch.Tensor:
            return value.to(dtype) if value.dtype.is_floating_point else value

        return pytree.tree_map_only(torch.Tensor, cast, self.inputs(T))


def randn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5


def recurrence(h, x, a):
    h = a * h + x
    return h, h


def gated(h, x, u):
    g = torch.sigmoid(x + u * h)
    h = g * h + (1 - g) * torch.tanh(x - u * h)
    return h, (h, g)


def two_carries(c, x, _):
    m, v = c
    m = 0.9 * m + 0.1 * x
    v = torch.where(x > 0, v * 0.5, v + x * x)
    return (m, v), m / (v.abs().sqrt() + 1)


def swapped(c, x, _):
    a, b = c
    return (b * x, torch.sin(a)), a - b


def counter(c, x, _):
    n, is_even, h = c
    h = torch.where(is_even, h + x, h * 0.5)
    return (n + 1, (n % 2) == 1, h), (n * 2, h.clamp(min=0))


def bytes_and_shorts(c, x, _):
    small, wide = c
    small = small * 3 + x["a"]  # wraps around
    return (small, torch.maximum(wide, x["b"]) - 1), (small // 2, wide ^ x["b"])


def shared_gate(h, x, _):
    h = h * torch.sigmoid(x["gate"]) + x["u"]
    return h, h


def shifted_x(h, x, _):
    h = h * 0.5 + F.pad(x[..., :-1], (1, 0))
    return h, F.pad(h * 2, (0, 0)) + h * 2


def constant_result(h, x, _):
    return h * 2 + x, torch.full_like(h, 3.0)


def transcendental(h, x, _):
    h = torch.erf(h) + torch.expm1(x) * torch.log1p(h.abs()) - torch.exp(-h.abs())
    return h, torch.logaddexp(h, x) + F.softplus(x) + torch.rsqrt(1 + h * h)


def lru(c, x, p):
    """A complex diagonal recurrence, as real and imaginary parts."""
    re, im = c
    re, im = p["re"] * re - p["im"] * im + x, p["re"] * im + p["im"] * re
    return (re, im), re


def selective_ssm(h, x, p):
    dt = F.softplus(x["u"] * p["dt"])[..., None]
    h = torch.exp(-dt * torch.exp(p["log_a"])) * h + dt * x["b"][:, None, :] * x["u"][..., None]
    return h, (h * x["c"][:, None, :]).sum(-1)


def averages_in_one(state, x, _):
    """A carry that is taken apart and put together again."""
    mean, square = state.unbind(1)
    mean, square = 0.9 * mean + 0.1 * x["x"], 0.9 * square + 0.1 * x["x"] ** 2
    state = torch.where(x["keep"][:, None, None], state * 0.5, torch.stack([mean, square], 1))
    return state, mean / (square.abs().sqrt() + 1)


W = (3, 37)  # a batch and a width, odd
CASES: dict[str, Case] = {
    "recurrence": Case(recurrence, lambda T: (randn(37), randn(T, 37), randn(37))),
    "gated": Case(gated, lambda T: (randn(*W), randn(T, *W), randn(37))),
    "two carries": Case(two_carries, lambda T: ((randn(*W), randn(*W)), randn(T, *W), None)),
    "swapped": Case(swapped, lambda T: ((randn(*W), randn(*W) + 0.1), randn(T, *W), None)),
    "counter": Case(
        counter,
        lambda T: (
            (torch.arange(37), torch.arange(37) % 3 == 0, randn(37)), randn(T, 37), None,
        ),
    ),
    "bytes and shorts": Case(
        bytes_and_shorts,
        lambda T: (
            (torch.arange(37, dtype=torch.uint8), torch.arange(37, dtype=torch.int16)),
            {
                "a": torch.arange(T * 37, dtype=torch.int32).view(T, 37).to(torch.uint8),
                "b": torch.arange(T * 37, dtype=torch.int16).view(T, 37),
            },
            None,
        ),
    ),
    "broadcast x": Case(
        shared_gate, lambda T: (randn(*W), {"gate": randn(T, 3, 1), "u": randn(T, *W)}, None)
    ),
    "transposed x": Case(
        recurrence, lambda T: (randn(*W).t().contiguous().t(), randn(37, 3, T).permute(2, 1, 0), randn(37))
    ),
    "shifted x": Case(shifted_x, lambda T: (randn(*W), randn(T, *W), None)),
    "scalar": Case(transcendental, lambda T: (randn(), randn(T), None)),
    "transcendental": Case(transcendental, lambda T: (randn(*W), randn(T, *W), None)),
    "averages in one": Case(
        averages_in_one,
        lambda T: (
            randn(3, 2, 37), {"x": randn(T, *W), "keep": torch.arange(3 * T).view(T, 3) % 4 == 0}, None
        ),
    ),
    "constant result": Case(constant_result, lambda T: (randn(37), randn(T, 37), None)),
    "lru": Case(
        lru,
        lambda T: (
            (randn(*W), randn(*W)),
            randn(T, *W),
            # within the unit circle, so that what is rounded stays small
            {"re": 0.4 * randn(37), "im": 0.4 * randn(37, 1)[:, 0]},
        ),
    ),
    "selective ssm": Case(
        selective_ssm,
        lambda T: (
            randn(3, 8, 4),
            {"u": randn(T, 3, 8), "b": randn(T, 3, 4), "c": randn(T, 3, 4) + 0.1},
            {"dt": randn(8), "log_a": randn(8, 4)},
        ),
    ),
}  # fmt: skip


def rnn(h, x, p):
    h = torch.tanh(h @ p["u"] + x)
    return h, h


def lstm(carry, x, p):
    h, c = carry
    i, f, g, o = (x @ p["w"] + h @ p["u"] + p["b"]).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return (h, c), h


def gru(h, x, p):
    x_r, x_z, x_n = (x @ p["w"] + p["b"]).chunk(3, -1)
    h_r, h_z, h_n = (h @ p["u"]).chunk(3, -1)
    r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
    n = torch.tanh(x_n + r * h_n)
    h = (1 - z) * n + z * h
    return h, h


def rnn_with_head(h, x, p):
    """What is made of a row for its y alone is as wide as it likes."""
    h = torch.tanh(h @ p["u"] + x)
    return h, (torch.log_softmax(h @ p["o"], -1), torch.cat([h, x[..., :1]], -1) @ p["r"])


def packed(state, x, p):
    h, c = lstm(state.chunk(2, -1), x, p)[0]
    return torch.cat([h, c], -1), h


def layers(states, x, p):
    """As torch has them: of each layer a row of one tensor, and its weights likewise."""
    after = states.clone()
    for k in range(2):
        x, _ = gru(states[k], x, {name: value[k] for name, value in p.items()})
        after[k] = x
    return after, (x, states)


def one_row(h, x, p):
    """Of which Inductor writes the gradient of a weight as ``column * row``, of any size on a GPU."""
    h = torch.tanh(h @ p["u"]) * x
    return h, h


def two_products(h, x, p):
    h = h + torch.relu((h + x) @ p["up"]) @ p["down"]
    return h, h.sigmoid()


def layer_norm(h, x, p):
    h = F.layer_norm(h + x, h.shape[-1:], p["g"], p["d"])
    return h, h


def softmax(h, x, p):
    h = torch.softmax(h * p["g"] + x, -1)
    return h, (h.amax(-1), h.argmax(-1))


def norm_in_cell(carry, x, p):
    h, c = carry
    n = x.shape[-1]
    gates = F.layer_norm(x @ p["w"], (4 * n,)) + F.layer_norm(h @ p["u"], (4 * n,)) + p["b"]
    i, f, g, o = gates.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(F.layer_norm(c, (n,), p["g"], p["d"]))
    return (h, c), h


def joined(h, x, p):
    """A row of two blocks; what is known of a row is read behind a mask first."""
    left, right = torch.softmax(torch.cat([h * p["g"], x], -1), -1).chunk(2, -1)
    total = (left * x).sum(-1, keepdim=True)
    shifted = F.pad((x / (total + 3))[..., :-1], (1, 0))
    return h + left - right, (shifted, total, (h / (total + 3)).var(-1))


def running(carry, x, _):
    """Numbers of each row are carried beside rows."""
    most, total, mean = carry
    next_most = torch.maximum(most, x.amax(-1))
    e = torch.exp(x - next_most[..., None])
    scale = torch.exp(most - next_most)
    total = total * scale[..., None] + e.sum(-1, keepdim=True)
    return (next_most, total, mean * scale[..., None] + e * x / total), (x > 0).any(-1)


def counted(carry, x, _):
    """One number of all rows, and one of each."""
    h, n, seen = carry
    n, seen = n + 1, seen + (x[..., 0] > 0)
    h = 0.9 * h + 0.1 * x
    return (h, n, seen), (h / (1 - 0.9**n), n * 2, x.tanh() / (1 + seen[..., None]))


def extremes_of_rows(h, x, p):
    h = torch.tanh(h @ p["u"] + x)
    known = h.amin(-1), h.argmin(-1), h.detach().prod(-1), (h > 0.9).any(-1), (h > 0).sum(-1)
    return h, (known, h - h.mean(-1, keepdim=True))


def row_case(step, weights, B=5, H=24, gates=1, carries=1):
    def inputs(T):
        sizes = {
            "b": (gates * H,),
            "down": (H, H),
            "g": (H,),
            "d": (H,),
            "o": (H, 7),
            "r": (H + 1, 2),
        }
        p = {name: randn(*sizes.get(name, (H, gates * H))) for name in weights}
        p |= {"down": p["down"].t()} if "down" in p else {}
        init = randn(B, H) if carries == 1 else tuple(randn(B, H) + k for k in range(carries))
        return init, randn(T, B, H), p

    return Case(step, inputs)


ROW_CASES: dict[str, Case] = {
    "rnn": row_case(rnn, "u"),
    "lstm": row_case(lstm, "wub", gates=4, carries=2),
    "gru": row_case(gru, "wub", gates=3),
    "two products": row_case(two_products, ("up", "down")),
    "lstm of 35 rows": row_case(lstm, "wub", 35, 16, gates=4, carries=2),
    "rnn with a head": row_case(rnn_with_head, "uor"),
    "one row": row_case(one_row, "u", 1, 16),
    "packed": Case(
        packed,
        lambda T: (
            randn(5, 48),
            randn(T, 5, 24),
            {"w": randn(24, 96), "u": randn(24, 96), "b": randn(96)},
        ),
    ),
    "layers": Case(
        layers,
        lambda T: (
            randn(2, 5, 16),
            randn(T, 5, 16),
            {"w": randn(2, 16, 48), "u": randn(2, 16, 48) + 0.1, "b": randn(2, 48)},
        ),
    ),
}


def hidden_markov(alpha, x, p):
    alpha = torch.logsumexp(alpha[:, :, None] + p["m"], 1) + x
    return alpha, alpha


def chain_of_tags(alpha, x, p):
    """A conditional random field: rows end at different steps."""
    emitted, is_there = x
    moved = torch.logsumexp(alpha[:, :, None] + p["m"] + emitted[:, None, :], 1)
    return torch.where(is_there[:, None], moved, alpha), None


def from_the_last(alpha, x, p):
    return torch.logsumexp(alpha[:, None, :] + p["m"] + x, -1), alpha


def of_one_row(alpha, x, p):
    alpha = torch.logsumexp(alpha[:, None] + p["m"], 0) + x
    return alpha, alpha


def best_path(score, x, m):
    score, before = (score[:, :, None] + m).max(1)
    return score + x, before


def shares(h, x, p):
    """The squares themselves are ys, and one row of them; a product is beside them."""
    square = torch.softmax(h[:, :, None] * p["m"] + x[:, None, :], 1)
    h = torch.tanh((square * h[:, None, :]).sum(1) + h @ p["u"])
    return h, (square, square.amax(1, keepdim=True), square.sum(2))


def beside_parts(h, x, p):
    square = torch.softmax(h[:, :, None] * p["m"], 1)
    h = (square * h[:, None, :]).sum(1) + torch.cat([x[:, 3:], torch.sin(h[:, 7:])], 1)
    return torch.tanh(h), square


def square_case(
    step: Any, *xs: tuple[int, ...], lead: tuple[int, ...] = (3,), width: int = 10
) -> Case:
    def inputs(T: int) -> tuple[Any, Any, Any]:
        parameters = {"m": randn(width, width), "u": randn(width, width) + 0.1}
        given = tuple(randn(T, *shape) for shape in xs)
        return randn(*lead, width), given[0] if len(given) == 1 else given, parameters

    return Case(step, inputs)


def random_squares(seed: int) -> Case:
    """A random body with one to three squares, each reduced along its rows or its columns."""
    draw = random.Random(seed)
    width, lead = draw.randint(9, 24), draw.choice([(), (3,), (2, 2)])
    rank = len(lead)
    dims = [(draw.choice([rank, rank + 1]), draw.random() < 0.3) for _ in range(3)]
    kinds = [draw.choice([*_REDUCED]) for _ in dims]
    joins = [draw.choice([torch.add, torch.mul, torch.sub, torch.maximum]) for _ in dims]
    shows = draw.random() < 0.5
    count = draw.randint(1, 3)

    def step(h: Any, x: Any, p: Any) -> Any:
        square = h
        for (dim, keepdim), kind, join in list(zip(dims, kinds, joins, strict=True))[:count]:
            across, down = h.unsqueeze(rank), h.unsqueeze(rank + 1)
            square = join(down, p["m"]) + torch.sin(across) * x.unsqueeze(2 * rank + 1 - dim)
            made = _REDUCED[kind](square, dim, keepdim)
            h = torch.tanh(made.squeeze(dim) if keepdim else made) * 0.7 + x
        return h, (h, square) if shows else h

    return square_case(step, (*lead, width), lead=lead, width=width)


_REDUCED: dict[str, Callable[[Any, int, bool], Any]] = {
    "sum": lambda square, dim, keepdim: square.sum(dim, keepdim) / square.shape[dim],
    "mean": lambda square, dim, keepdim: square.mean(dim, keepdim),
    "amax": lambda square, dim, keepdim: square.amax(dim, keepdim),
    "amin": lambda square, dim, keepdim: square.amin(dim, keepdim),
    "logsumexp": lambda square, dim, keepdim: torch.logsumexp(square, dim, keepdim),
    "softmax": lambda square, dim, keepdim: (torch.softmax(square, dim) * square).sum(dim, keepdim),
    "any": lambda square, dim, keepdim: torch.where((square > 1).any(dim, keepdim), 0.5, 0.2),
}


# a square of each row is reduced to a row, as in a product with a weight
SQUARE_CASES: dict[str, Case] = {
    "hidden markov": square_case(hidden_markov, (3, 10)),
    "32 states": square_case(hidden_markov, (2, 32), lead=(2,), width=32),
    "chain of tags": Case(
        chain_of_tags,
        lambda T: (randn(3, 10), (randn(T, 3, 10), randn(T, 3) > -0.2), {"m": randn(10, 10)}),
    ),
    "from the last": square_case(from_the_last, (3, 10, 10)),
    "a row of states": square_case(of_one_row, (10,), lead=()),
    "best path": Case(best_path, lambda T: (randn(3, 10), randn(T, 3, 10), randn(10, 10))),
    "shares": square_case(shares, (3, 10)),
}

# of each row something is known: its mean, its greatest element
NORM_CASES: dict[str, Case] = {
    "layer norm": row_case(layer_norm, "gd", 35, 24),
    "softmax": row_case(softmax, "g"),
    "norm in a cell": row_case(norm_in_cell, "wubgd", gates=4, carries=2),
    "two blocks": row_case(joined, "g"),
    "running": Case(
        running, lambda T: ((randn(2, 3), randn(2, 3, 1) ** 2 + 1, randn(2, 3, 40)), randn(T, 2, 3, 40), None)
    ),
    "extremes of rows": row_case(extremes_of_rows, "u"),
    "counted": Case(
        counted, lambda T: ((randn(3, 24), torch.tensor(0), torch.arange(3)), randn(T, 3, 24), None)
    ),
    "norm of one row": row_case(layer_norm, "gd", 1),
    "norm of a vector": Case(
        layer_norm, lambda T: (randn(40), randn(T, 40), {"g": randn(40), "d": randn(40)})
    ),
}  # fmt: skip


# --- steps that draw: what they drew is the last of their ys, and may be given to them ---


def drops(h: Any, x: Any, p: Any, drawn: Any = None) -> Any:
    if drawn is None:
        dropped = F.dropout(torch.tanh(h * p["d"] + x), 0.3)
        return dropped, (dropped, dropped != 0)
    h = torch.tanh(h * p["d"] + x) * drawn / 0.7
    return h, (h, drawn)


def sum_that_drops(h: Any, x: Any, p: Any, drawn: Any = None) -> Any:
    drawn = torch.rand_like(h) > 0.3 if drawn is None else drawn
    h = (h * torch.sigmoid(p) + x) * drawn / 0.7
    return h, (h, drawn)


def lstm_that_drops(carry: Any, x: Any, p: Any, drawn: Any = None) -> Any:
    (h, c), _ = lstm(carry, x, p)
    drawn = torch.rand_like(h) > 0.3 if drawn is None else drawn
    h = h * drawn / 0.7
    return (h, c), (h, drawn)


def noisy(h: Any, x: Any, p: Any, drawn: Any = None) -> Any:
    drawn = torch.randn_like(x) if drawn is None else drawn
    h = torch.tanh(h @ p["u"] + x * 0.3) + 0.1 * drawn
    return h - h.mean(-1, keepdim=True), (h, drawn)


def chooses(h: Any, x: Any, p: Any, drawn: Any = None) -> Any:
    drawn = torch.randint(-1, 2, h.shape, device=h.device) if drawn is None else drawn
    h = torch.where(drawn == 0, x, torch.tanh(h * p["d"] + drawn))
    return h, (h, drawn)


DRAW_CASES: dict[str, Case] = {
    "drops": row_case(drops, "d"),
    "sum that drops": Case(sum_that_drops, lambda T: (randn(3), randn(T, 3), randn(3))),
    "lstm that drops": row_case(lstm_that_drops, "wub", gates=4, carries=2),
    "noisy": row_case(noisy, "u"),
    "chooses": row_case(chooses, "d"),
}
