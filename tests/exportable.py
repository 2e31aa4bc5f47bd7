"""Programs with a scan that are exported, for whoever reads what ``torch.export`` gives."""

from __future__ import annotations

import functools

import torch
from oracle import loop
from torch import nn

from torch_scan_hop import scan


class Program(nn.Module):
    """``body(self, scan, h, xs)``, with the scan, or with the loop in its place."""

    def __init__(self, body):
        super().__init__()
        self.body, self.scan = body, scan
        self.linear, self.lstm, self.gru = nn.Linear(3, 3), nn.LSTMCell(3, 3), nn.GRUCell(3, 3)
        self.register_buffer("w", torch.linspace(-1, 1, 9).reshape(3, 3))

    def forward(self, h, xs):
        return self.body(self, self.scan, h, xs)

    def step(self, h, x):
        return torch.tanh(h @ self.w + self.linear(x))

    def with_loop(self, *inputs):
        self.scan = loop
        try:
            with torch.no_grad():
                return self(*inputs)
        finally:
            self.scan = scan


def rnn(self, scan, h, xs, **options):
    def cell(h, x):
        h = self.step(h, x)
        return h, h

    return scan(cell, h, xs, **options)


def trees(self, scan, h, xs):
    def cell(carry, x):
        h = self.step(carry["h"], x["a"])
        return {"h": h, "n": carry["n"] + 1}, (h.sum(-1), x["b"], carry["n"])

    return scan(cell, {"h": h, "n": torch.zeros((), dtype=torch.int64)}, {"a": xs, "b": xs * 2})


def lstm(self, scan, h, xs):
    def cell(state, x):
        state = self.lstm(x, state)
        return state, state[0]

    return scan(cell, (h, h), xs)


def gru(self, scan, h, xs):
    def cell(h, x):
        h = self.gru(x, h)
        return h, h

    return scan(cell, h, xs)


def swapped(self, scan, h, xs):
    """Each carry is the other one, and they share what they are made of."""

    def cell(carry, x):
        (a, b), parts = carry, torch.cat([x, x.sin()], 1).chunk(2, 1)
        return (b, a), (*parts, a, b)

    return scan(cell, (h, h + 1), xs)


def views(self, scan, h, xs):
    def cell(carry, x):
        h, same = carry
        h = torch.tanh(h @ self.w + x)
        return (h, same), (h, h.t(), x.reshape(-1), h[0], same, self.w.t())

    return scan(cell, (h, h * 2), xs)


def heads(self, scan, h, xs):
    """What a step reads is viewed, the carry, too, and what it returns is what was viewed."""

    def cell(h, x):
        parts = h.view(2, 3, 1) * self.w.view(1, 3, 3)
        return torch.tanh(parts.sum(1) + x), (h.reshape(6), h.unsqueeze(0), x.view(3, 2))

    return scan(cell, h, xs)


def statistics(self, scan, h, xs):
    total = torch.zeros(2, 3)

    def cell(h, x):
        total.add_(x)
        return h * 0.5 + total, h

    return scan(cell, h, xs), total


def nested(self, scan, h, xs):
    return scan(lambda h, x: scan(lambda a, _: (a.sin() + x, a), h, length=3), h, xs)


def two(self, scan, h, xs):
    h, hs = rnn(self, scan, h, xs)
    return rnn(self, scan, h, hs, reverse=True)


PROGRAMS = {
    "rnn": rnn,
    "reversed": lambda self, scan, h, xs: rnn(self, scan, h, xs, reverse=True),
    "reversed trees": lambda self, scan, h, xs: trees(
        self, functools.partial(scan, reverse=True), h, xs
    ),
    "another dimension": lambda self, scan, h, xs: rnn(self, scan, h, xs.movedim(0, 1), dim=1),
    "unrolled": lambda self, scan, h, xs: rnn(self, scan, h, xs, unroll=2),
    "trees": trees,
    "lstm": lstm,
    "no y": lambda self, scan, h, xs: scan(lambda h, x: (self.step(h, x), None), h, xs)[0],
    "no xs": lambda self, scan, h, xs: scan(lambda h, _: (torch.tanh(h @ self.w), h), h, length=5),
    "what came in": lambda self, scan, h, xs: scan(lambda h, x: (x, (h, x, h)), h, xs),
    "what is closed over": lambda self, scan, h, xs: scan(lambda h, x: (h + x, self.w), h, xs),
    "table": lambda self, scan, h, xs: scan(
        lambda h, t: (h + xs[t], h), h, torch.tensor([2, 0, 1])
    ),
    "gru": gru,
    "swapped": swapped,
    "views": views,
    "heads": heads,
    "statistics": statistics,
    "nested": nested,
    "two": two,
}
