"""What torch's own ``scan()`` does, as JSON: ``python own_scan_report.py IMPORTS GROUP FOLDER``.

Run by ``test_own_scan_as_torch_has_it``, once with ``torch`` alone and once with this package.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

# a run of doctests imports every file
imports, group, where = sys.argv[1:4] if __name__ == "__main__" else ("torch", "eager", ".")
folder = Path(where)
__import__(imports)
scan = torch._higher_order_ops.scan
Module = sys.modules["torch._higher_order_ops.scan"]

H, XS = torch.ones(2, 3), torch.linspace(-1, 1, 24).reshape(4, 2, 3)
W = torch.linspace(-1, 1, 9).reshape(3, 3)


def cell(h, x):
    new = torch.sin(h + x)
    return new, new * 2


def scans(body, init=H, xs=XS, **options):
    """A behaviour: a scan with ``body``."""
    return lambda: run(lambda init, xs: scan(body, init, xs, **options), init, xs)


def run(program: Callable[..., Any], *args: Any) -> Any:
    if group == "eager":
        return program(*args)
    return torch.compile(program, backend=group, fullgraph=True)(*args)


def writes_to_a_buffer():
    buffer = torch.zeros(2, 3)

    def body(h, x):
        buffer.add_(x)
        return h + x, h * buffer

    with torch.no_grad():
        return scans(body)(), buffer


def writes_to_a_modules_buffer():
    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(3))

        def forward(self, h, xs):
            def body(h, x):
                self.n.add_(x.sum(0))
                return h + x + self.n, h * 2

            return scan(body, h, xs)

    module = Counts()
    with torch.no_grad():
        return run(module, H, XS), module.n


def gradients():
    leaves = [v.clone().requires_grad_() for v in (H, XS, W)]

    def program(h, xs, w):
        return scan(lambda h, x: ((new := torch.tanh(h @ w + x)), new * 2), h, xs)

    carry, ys = run(program, *leaves)
    return torch.autograd.grad(carry.sum() + (ys**2).sum(), leaves)


def vmapped(body):
    def program(h, xs):
        return torch.vmap(lambda h, xs: scan(body, h, xs), in_dims=(0, 1))(h, xs)

    return lambda: run(program, H, XS)


def inner_scan(h, x):
    carry, ys = scan(lambda h, x: (h + x, h * x), h, x.reshape(3, *[1] * h.dim()))
    return h * 0.5 + carry, ys.clone()


def of_a_gru():
    torch.manual_seed(0)
    gru = torch.nn.GRUCell(3, 3)
    carry, ys = scans(lambda h, x: ((new := gru(x, h)), new * 1))()
    return ys, torch.autograd.grad(ys.sum() + carry.sum(), list(gru.parameters()))


#: what a call gives or refuses, in eager mode and compiled
CALLS: dict[str, Callable[[], Any]] = {
    "plain": scans(cell),
    "backwards along dim 1": scans(cell, torch.ones(4, 3), dim=1, reverse=True),
    "the last dim": scans(cell, torch.ones(4, 2), dim=-1),
    "ys of fewer dimensions than dim": scans(
        lambda h, x: (h + x, h.sum()), torch.ones(4, 3), dim=1
    ),
    "a dict of ys": scans(lambda h, x: (h + x, {"z": x * 2, "a": h * 3})),
    "no ys": scans(lambda h, x: (h + x, [])),
    "a tuple of carries": scans(lambda c, x: ((c[0] + x, c[1] * 2), x * 2), (H, H * 2)),
    "no xs": scans(cell, H, None),
    "an empty xs": scans(cell, H, XS[:0]),
    "gradients": gradients,
    "a GRU": of_a_gru,
    "requires grad": lambda: [
        r.requires_grad
        for r in scans(lambda c, x: (c * W.clone().requires_grad_()[0] + x, x * 2))()
    ],
    "vmap": vmapped(cell),
    "vmap of nested scans": vmapped(inner_scan),
    "nested scans": scans(inner_scan, torch.ones(3), XS[:, 0]),
    "buffer written": writes_to_a_buffer,
    "buffer of a module written": writes_to_a_modules_buffer,
    "carry written": scans(lambda h, x: (h.add_(x) + 1, h * 2), H.clone()),
    "x written": scans(lambda h, x: (h + x.add_(1), h * 2), H, XS.clone()),
    "carry returned as y": scans(lambda h, x: ((new := h + x), new)),
    "x returned as y": scans(lambda h, x: (h + x, x)),
    "carry as it was": scans(lambda h, x: (h, x * 2)),
    "a number as carry": scans(lambda h, x: (0.0, x + h)),
    "a number as y": scans(lambda h, x: (h + x, 3.0)),
    "fewer carries": scans(lambda c, x: ((c[0] + x,), c[1] * 2), (H, H * 2)),
    "more carries": scans(lambda c, x: ((c[0] + x, c[0] * 2), x * 2), (H,)),
    "another dtype": scans(lambda h, x: ((h + x).double(), x * 2)),
    "another shape": scans(lambda h, x: ((h + x).sum(), x * 2)),
    "other strides": scans(lambda h, x: ((h + x).t().contiguous().t(), x * 2)),
    "one result": scans(lambda h, x: h + x),
    "three results": scans(lambda h, x: (h + x, h * 2, x * 2)),
    "init is a number": scans(cell, 1.0),
    "no init": scans(lambda h, x: ((), x * 2), ()),
    "dim is no int": scans(cell, dim="0"),
    "no function": scans("cell"),
}


def written(h, x, buffer):
    return h + x + buffer.add_(1), h * 2


def functionalized(body):
    return lambda: torch.func.functionalize(lambda h, xs: scan(body, h, xs))(H.clone(), XS.clone())


def recorded(program, *args, **options):
    """The code that make_fx writes."""
    with torch.no_grad():
        return make_fx(program, **options)(*args)


def plain(h, xs):
    return scan(cell, h, xs)


def with_buffer(h, xs, buffer):
    return scan(lambda h, x: written(h, x, buffer), h, xs)


def exported(program, *args):
    class Program(torch.nn.Module):
        def forward(self, *args):
            return program(*args)

    args = tuple(a.clone() for a in args)
    with torch.no_grad():
        return torch.export.export(Program(), args)


def code_and_results(program, *args):
    args = tuple(a.clone() for a in args)
    return program.graph_module.code, program.module()(*args), args


def loaded(name, program, args, then):
    """A program that was saved without this package."""
    path = folder / f"{name}.pt2"
    if imports == "torch":
        torch.export.save(exported(program, *args), path)
    args = tuple(a.clone() for a in args)
    with torch.no_grad():
        return then(torch.export.load(path).module())(*args), args


def compiled(backend):
    return lambda module: torch.compile(module, backend=backend)


def schema_of(body, additional, *written):
    graph = recorded(body, H, H, *additional)
    return str(torch.ops.higher_order.scan.gen_schema(graph, (H,), (XS,), additional, *written))


def of_hop_db():
    from torch.testing._internal.hop_db import hop_db

    (info,) = [info for info in hop_db if info.name == "scan"]
    (sample,) = info.sample_inputs("cpu", torch.float32, requires_grad=False)
    return [
        r.shape
        for r in (
            *info.op(sample.input, *sample.args),
            *torch.compile(info.op, backend="aot_eager", fullgraph=True)(
                sample.input, *sample.args
            ),
        )
    ]


#: what torch records of its scan, and what becomes of that
GRAPHS: dict[str, Callable[[], Any]] = {
    "functionalized": functionalized(cell),
    "functionalized, carry written": functionalized(lambda h, x: (h.add_(x) + 1, h * 2)),
    "functionalized, x written": functionalized(lambda h, x: (h + x.add_(1), h * 2)),
    "functionalized, carry a view": functionalized(lambda h, x: (h.view(3, 2).view(2, 3), h * 2)),
    "recorded": lambda: recorded(plain, H, XS).code,
    "recorded, symbolic": lambda: recorded(plain, H, XS, tracing_mode="symbolic").code,
    "recorded, functionalized": lambda: recorded(torch.func.functionalize(plain), H, XS).code,
    "recorded, buffer written": lambda: recorded(with_buffer, H, XS, H.clone()).code,
    "recorded, pickled": lambda: pickle.loads(pickle.dumps(recorded(plain, H, XS)))(H, XS),
    "recorded, copied": lambda: copy.deepcopy(recorded(plain, H, XS)).code,
    "recorded, traced": lambda: torch.fx.symbolic_trace(recorded(plain, H, XS)).code,
    "recorded, compiled": lambda: compiled("aot_eager")(recorded(plain, H, XS))(H, XS),
    "exported": lambda: code_and_results(exported(plain, H, XS), H, XS),
    "exported, buffer written": lambda: code_and_results(exported(with_buffer, H, XS, H), H, XS, H),
    "exported, decomposed": lambda: code_and_results(
        exported(plain, H, XS).run_decompositions(), H, XS
    ),
    "loaded": lambda: loaded("plain", plain, (H, XS), lambda m: m),
    "loaded, buffer written": lambda: loaded("buffer", with_buffer, (H, XS, H), lambda m: m),
    "loaded, compiled": lambda: loaded("compiled", with_buffer, (H, XS, H), compiled("aot_eager")),
    "schema": lambda: schema_of(lambda h, x: (h + x, h * 2), ()),
    "schema, buffer written": lambda: schema_of(written, (H.clone(),), "2"),
    "torch's list of operators": of_hop_db,
}


def told(result: Any) -> str:
    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        numbers = [round(v, 4) for v in value.detach().double().flatten().tolist()]
        return value.shape, str(value.dtype), value.stride(), value.requires_grad, numbers

    return repr(torch.utils._pytree.tree_map(leaf, result))


def outcome(behaviour: Callable[[], Any]) -> str:
    torch._dynamo.reset()
    try:
        return told(behaviour())
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return f"raises {type(error).__name__}: {first}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    found = {}
    with contextlib.redirect_stderr(io.StringIO()):
        for name, behaviour in (GRAPHS if group == "graphs" else CALLS).items():
            found[name] = outcome(behaviour)
    print(json.dumps(found))
