"""What a newcomer gets wrong: a name, and a call that raises."""

from __future__ import annotations

import os
from collections import namedtuple

import numpy as np
import torch
from torch import nn

from torch_scan_hop import (
    Binomial,
    accelerate_torch,
    debug,
    fallback,
    progress,
    scan,
    scan_layers,
    set_default,
)

XS, H = torch.ones(3, 2), torch.zeros(2)
Pair = namedtuple("Pair", ["first", "second"])
CELL = nn.GRUCell(2, 2)


def add(h, x):
    return h + x, h


async def awaited(h, x):
    return h, h


def generated(h, x):
    yield h


def carries(value):
    return lambda h, x: (value, None)


def returns(value):
    return lambda h, x: value


def swapped(pair):
    return list(pair) if isinstance(pair, tuple) else tuple(pair)


def in_turn(c, x):
    return (c[0], x if c[1] is None else None), None


def steps_apart(h, x):
    return h + 1, torch.ones(int(h[0]) + 1)


def leaves_apart(h, x):
    return h + 1, [h] * (int(h[0]) + 1)


def branches(h, x):
    return (h + x, h) if x.sum() > 1 else (h - x, h)


def writes_a_file(h, x):
    with open(os.devnull, "w") as file:
        file.write("a step")
    return h + x, h


def prints(h, x):
    print("at", x)
    return h + x, h


def masks(h, x):
    return h + h[x > 0].cumsum(0)[-1], h


def under_error(combine_fn):
    def run():
        with fallback("error"):
            return scan(combine_fn, H, XS)

    return run


op = torch.ops.higher_order.scan

#: arguments of scan
ARGUMENTS = {
    "combine_fn is a number": lambda: scan(3, H, XS),
    "combine_fn is None": lambda: scan(None, H, XS),
    "combine_fn and init swapped": lambda: scan(H, add, XS),
    "combine_fn is a module's class": lambda: scan(nn.GRUCell, H, XS),
    "combine_fn is async": lambda: scan(awaited, H, XS),
    "init is a string": lambda: scan(add, "h", XS),
    "init is a set": lambda: scan(add, {1.0}, XS),
    "init is an array": lambda: scan(add, np.zeros(2), XS),
    "init holds a string": lambda: scan(add, {"h": H, "name": "x"}, XS),
    "init holds a string in a named tuple": lambda: scan(add, Pair(H, "x"), XS),
    "init holds a function": lambda: scan(add, (H, [torch.sin]), XS),
    "xs is an array": lambda: scan(add, H, np.ones((3, 2))),
    "xs is a range": lambda: scan(add, H, range(3)),
    "xs is a number": lambda: scan(add, H, 3),
    "xs is a list of numbers": lambda: scan(add, H, [1.0, 2.0]),
    "xs holds a number": lambda: scan(add, H, {"a": XS, "k": 3.0}),
    "xs is a scalar": lambda: scan(add, H, torch.tensor(1.0)),
    "xs of two lengths": lambda: scan(add, H, {"a": XS, "b": (torch.ones(4, 2),)}),
    "a list of tensors of two lengths": lambda: scan(add, H, [torch.ones(2), torch.ones(3)]),
    "neither xs nor length": lambda: scan(add, H),
    "xs of None and no length": lambda: scan(add, H, {"a": None}),
    "length is a tensor": lambda: scan(add, H, None, torch.tensor(3)),
    "length is a float": lambda: scan(add, H, None, 2.5),
    "length is negative": lambda: scan(add, H, None, -1),
    "length disagrees": lambda: scan(add, H, {"a": XS}, 4),
    "dim is too large": lambda: scan(add, H, {"a": XS}, dim=2),
    "dim is too small": lambda: scan(add, H, XS, dim=-3),
    "dim is a tuple": lambda: scan(add, H, XS, dim=(0,)),
    "reverse is a number": lambda: scan(add, H, XS, reverse=1),
    "unroll is zero": lambda: scan(add, H, XS, unroll=0),
    "unroll is a string": lambda: scan(add, H, XS, unroll="2"),
    "unroll is True": lambda: scan(add, H, XS, unroll=True),
    "checkpoint is True": lambda: scan(add, H, XS, checkpoint=True),
    "checkpoint is unknown": lambda: scan(add, H, XS, checkpoint="everything"),
    "checkpoint is zero": lambda: scan(add, H, XS, checkpoint=0),
    "snapshots are a string": lambda: scan(add, H, XS, checkpoint=Binomial("a")),
    "no snapshots": lambda: scan(add, H, XS, checkpoint=Binomial(0)),
    "compile is a string": lambda: scan(add, H, XS, compile="yes"),
    "progress is a number": lambda: scan(add, H, XS, progress=3),
}

#: what combine_fn returns
BODIES = {
    "it returns nothing": lambda: scan(returns(None), H, XS),
    "it returns the carry alone": lambda: scan(lambda h, x: h + x, H, XS),
    "it is a cell of torch's": lambda: scan(CELL, H[None], XS[:, None]),
    "it returns three values": lambda: scan(lambda h, x: (h, x, x), H, XS),
    "it is a generator": lambda: scan(generated, H, XS),
    "it returns y first": lambda: scan(lambda h, x: (None, h + x), H, XS),
    "another shape": lambda: scan(lambda c, x: ({"h": c["h"][:1]}, None), {"h": H}, XS),
    "a shape by broadcasting": lambda: scan(lambda c, x: (c[None] + x, None), torch.zeros(()), XS),
    "another dtype": lambda: scan(lambda c, x: ((c[0], c[1].double()), None), (H, H), XS),
    "another device": lambda: scan(lambda c, x: (c.to("meta"), None), H, XS),
    "half precision": lambda: scan(lambda c, x: (c.half(), None), H, XS),
    "an integer divided": lambda: scan(lambda c, x: (c / 2, None), torch.tensor(4), XS),
    "another container": lambda: scan(lambda c, x: (swapped(c), None), (H, H), XS),
    "another length": lambda: scan(lambda c, x: ((c[0],), None), (H, H), XS),
    "other keys": lambda: scan(lambda c, x: ({"c": x}, None), {"h": H}, XS),
    "a key more": lambda: scan(lambda c, x: ({**c, "c" * len(c): x}, None), {"h": H}, XS),
    "a tensor for a dict": lambda: scan(lambda c, x: (x, None), {"h": H}, XS),
    "a dict for a tensor": lambda: scan(lambda c, x: ({"h": x}, None), H, XS),
    "None for a tensor": lambda: scan(lambda c, x: ((c[0], None), None), (H, H), XS),
    "a tensor for None": lambda: scan(in_turn, (H, None), XS),
    "a string for a tensor": lambda: scan(carries("h"), H, XS),
    "a vector for a number": lambda: scan(
        lambda c, x: (torch.as_tensor(c)[None] + x, None), 0.0, XS
    ),
    "a string in y": lambda: scan(lambda c, x: (c, {"a": ("text",)}), H, XS),
    "a function in y": lambda: scan(lambda c, x: (c, [torch.sin]), H, XS),
}

#: what no capture is made of, seen in eager mode alone
LOOPS = {
    "y grows": lambda: scan(steps_apart, H, XS),
    "y has more leaves": lambda: scan(leaves_apart, H, XS),
    "it branches on data": under_error(branches),
    "it writes a file": under_error(writes_a_file),
    "it prints": under_error(prints),
    "it reads by a mask": under_error(masks),
}

#: other functions of the package, and the operator
OTHERS = {
    "fallback is misspelt": lambda: fallback("eror"),
    "an unknown default": lambda: set_default(unroll=2),
    "a default of another type": lambda: set_default(compile=1),
    "accelerate_torch of a string": lambda: accelerate_torch("yes"),
    "debug of a string": lambda: debug(detect_nonfinite="yes").__enter__(),
    "progress of a number": lambda: progress(3).__enter__(),
    "a layer that is none": lambda: scan_layers([nn.Linear(2, 2), "x"], H),
    "layers of two widths": lambda: scan_layers([nn.Linear(2, 2), nn.Linear(2, 3)], H),
    "layers of two kinds": lambda: scan_layers([nn.Linear(2, 2), nn.Tanh()], H),
    "layers that change the width": lambda: scan_layers([nn.Linear(2, 3) for _ in "ab"], H),
    "the operator with a tensor for init": lambda: op(add, H, [XS]),
    "the operator without xs": lambda: op(add, [H], []),
    "the operator with xs of two lengths": lambda: op(add, [H], [XS, torch.ones(4, 2)]),
    "the operator with a carry that shrinks": lambda: op(lambda h, x: (h[:1], h), [H], [XS]),
    "the operator with a carry too few": lambda: op(lambda h, c, x: (h,), [H, H], [XS]),
    "torch.fx.symbolic_trace": lambda: torch.fx.symbolic_trace(lambda x: scan(add, H, x)[0]),
}
