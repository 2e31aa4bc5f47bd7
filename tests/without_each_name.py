"""What becomes of the package where torch has not got one of the private names that it uses.

``python tests/without_each_name.py [NAME ...]`` prints an outcome for each, and without names
writes them to ``tests/without_each_name.txt``, which has those of the newest torch, and where
others differ from that. Each runs in a process of its own, forked from one
that has imported torch, Dynamo and Inductor, and not this package.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_suffix(".txt")


def tables() -> dict[str, dict[str, str]]:
    """The outcomes by version."""
    newest, *others = TABLE.read_text().split("# torch ")[1:]
    found: dict[str, dict[str, str]] = {}
    for text in (newest, *others):
        version, *lines = text.splitlines()
        given = dict(line.split(": ", 1) for line in lines if line)
        found[version] = {**(found[newest.splitlines()[0]] if found else {}), **given}
    return found


def write(version: str, outcomes: dict[str, str]) -> None:
    """The newest version first, whole; of others what differs."""
    found = {**(tables() if TABLE.exists() else {}), version: outcomes}
    newest, *others = sorted(found, key=lambda v: tuple(map(int, v.split("."))), reverse=True)
    parts = []
    for each in (newest, *others):
        known = found[newest] if each != newest else {}
        rows = sorted(row for row in found[each].items() if known.get(row[0]) != row[1])
        parts.append(f"# torch {each}\n" + "".join(f"{name}: {said}\n" for name, said in rows))
    TABLE.write_text("\n".join(parts))


def forbidden(outcomes: dict[str, str]) -> dict[str, str]:
    return {n: said for n, said in outcomes.items() if any(word in said for word in FORBIDDEN)}


#: what nothing may ever become
FORBIDDEN = ("fails", "wrong", "other warnings", "eager refused", "unrelated code refused")


#: all that reaches the shims of Inductor; to it, a loop that is not captured is any other code
OF_INDUCTOR = ("Inductor", "Inductor, lanes", "Inductor, products", "unrelated code, later")
OF_COMPILERS = (*OF_INDUCTOR, "compile=True", "checkpoint", "explain")


def _is_inductors(shim: str) -> bool:
    return shim.removeprefix("_torch.").startswith(("inductor", "onednn", "triton"))


def _tells_nothing(program: str, shims: list[str]) -> bool:
    """Whether another program of the list says the same."""
    if shims and all(map(_is_inductors, shims)) and "_torch.inductor_dry_run" not in shims:
        return program not in ("unrelated code", "eager", *OF_INDUCTOR)
    from torch_scan_hop._torch import capabilities

    captures = capabilities.captures and capabilities.why_off("operator") is None
    return not captures and program in OF_COMPILERS


def _programs() -> dict[str, Callable[[], Any]]:
    """Each gives ``(got, wanted)``, or raises."""
    import torch

    import torch_scan_hop
    from torch_scan_hop import scan

    torch.manual_seed(0)
    h, xs = torch.ones(2, 3), torch.randn(4, 2, 3)
    w = torch.randn(3, 3, requires_grad=True)

    def cell(h, x):
        new = torch.tanh(h @ w + x)
        return new, new * 2

    def lanes(h, x):
        return torch.sin(h + x), h * x

    def product(h, x):  # a carry that no row of is independent: a counted loop
        return torch.tanh(h.t() @ h + x.sum()), x

    def loop(body, h, xs):
        ys = []
        for x in xs:
            h, y = body(h, x)
            ys.append(y)
        return h, torch.stack(ys)

    def with_gradients(run):
        got = run(cell, h, xs)
        return (*got, *torch.autograd.grad(got[1].sum() + got[0].sum(), [w]))

    def compiled(**options):
        torch._dynamo.reset()
        run = torch.compile(lambda body, h, xs: scan(body, h, xs), **options)
        return lambda body, h, xs: run(body, h, xs)

    def unrelated(backend):
        torch._dynamo.reset()
        x = torch.arange(3.0, requires_grad=True)
        got = torch.compile(lambda x: x * 2 + 1, backend=backend)(x)
        return (got, *torch.autograd.grad(got.sum(), x)), (x * 2 + 1, torch.full((3,), 2.0))

    def under_transforms(run):
        hs = torch.stack([h, h + 1])
        batched = torch.func.vmap(lambda h: run(lanes, h, xs))(hs)
        tangent = torch.func.jvp(lambda h: run(lanes, h, xs)[0], (h,), (h,))
        slope = torch.func.grad(lambda h: run(lanes, h, xs)[1].sum())(h)
        return (*batched, *tangent, slope)

    def exported():
        class Program(torch.nn.Module):
            def forward(self, h, xs):
                return scan(lanes, h, xs)

        return torch.export.export(Program(), (h, xs)).module()(h, xs)

    def checkpointed():
        from torch.utils.checkpoint import checkpoint

        got = checkpoint(lambda h: scan(cell, h, xs), h, use_reentrant=False)
        return (*got, *torch.autograd.grad(got[1].sum() + got[0].sum(), [w]))

    def through_torchs_scan():
        return torch._higher_order_ops.scan(lanes, h, xs), loop(lanes, h, xs)

    def layers():
        made = [torch.nn.Linear(3, 3) for _ in range(2)]
        return torch_scan_hop.scan_layers(made, h), torch.nn.Sequential(*made)(h)

    def explained():
        return "loop" in str(torch_scan_hop.explain(lanes, h, xs)), True

    square = torch.eye(3) / 2, xs[:, 0]
    want, trained = loop(lanes, h, xs), with_gradients(loop)
    return {
        "unrelated code": lambda: unrelated("eager"),
        "eager": lambda: (with_gradients(scan), trained),
        "transforms": lambda: (under_transforms(scan), under_transforms(loop)),
        "checkpoint": lambda: (checkpointed(), trained),
        "layers": layers,
        "torch's scan": through_torchs_scan,
        "compile=True": lambda: (
            with_gradients(lambda *call: scan(*call, compile=True)), trained,
        ),
        "aot_eager": lambda: (with_gradients(compiled(backend="aot_eager")), trained),
        "Inductor": lambda: (with_gradients(compiled()), trained),
        "Inductor, lanes": lambda: (compiled(fullgraph=True)(lanes, h, xs), want),
        "Inductor, products": lambda: (compiled()(product, *square), loop(product, *square)),
        "export": lambda: (exported(), want),
        "explain": explained,
        "unrelated code, later": lambda: unrelated("inductor"),
    }  # fmt: skip


def _outcome(program: Callable[[], Any]) -> str:
    import torch

    try:
        got, wanted = program()
    except Exception as error:
        if os.environ.get("TRACEBACKS"):
            traceback.print_exc()
        first = (str(error).strip().splitlines() or [""])[0]
        said = "torch_scan_hop: " in str(error)
        return "refused" if said else f"fails ({type(error).__name__}: {first[:60]})"
    leaves = torch.utils._pytree.tree_leaves
    try:
        for mine, its in zip(leaves(got), leaves(wanted), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)
    except AssertionError:
        return "wrong"
    return ""


def _in_this_process(name: str | None) -> str:
    from private_names import private_names, take_away

    shims = [] if name is None else private_names()[name]

    found: dict[str, str] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if name is not None:
                take_away(name)
            programs = _programs()
        except Exception as error:
            if os.environ.get("TRACEBACKS"):
                traceback.print_exc()
            return f"import fails ({type(error).__name__})"
        for what, program in programs.items():
            if not _tells_nothing(what, shims):
                found[what] = _outcome(program)
    told = {str(w.message) for w in caught if str(w.message).startswith("torch_scan_hop")}
    # one that names the capability, the name, and the versions that have it
    says_why = re.compile(rf"\((\w+)\) is switched off: torch \S+ has no {name} \(torch 2\.\S+ ")
    off = sorted(m[1] for m in map(says_why.search, told) if m)
    others = len(told) - len(off)
    parts = [f"without {', '.join(off)}"] if off else []
    parts += [f"{others} other warnings"] if others else []
    parts += [f"{what} {said}" for what, said in found.items() if said]
    if os.environ.get("TRACEBACKS"):
        print(*told, sep="\n", file=sys.stderr)
    return "; ".join(parts) or "as ever"


def outcome_of(name: str | None) -> str:
    """In a process of its own."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        text = "fails (the process ended)"
        try:
            quiet = contextlib.nullcontext() if os.environ.get("TRACEBACKS") else _silence()
            with quiet:
                text = _in_this_process(name)
        finally:
            os.write(write, text.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def _silence() -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
    return stack


def prepare() -> None:
    """What is imported once; what Inductor keeps of one name's programs is not another's."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    os.environ |= {
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": tempfile.gettempdir() + "/without_each_name",
    }
    import torch
    import torch._dynamo
    import torch._inductor.compile_fx
    from private_names import private_names

    private_names()  # read once, for all that are forked
    torch.set_num_threads(1)


if __name__ == "__main__":
    prepare()
    from private_names import private_names

    assert not any(m.startswith("torch_scan_hop") for m in sys.modules)
    found = {}
    for each in sys.argv[1:] or private_names():
        found[each] = outcome_of(None if each == "none" else each)
        print(f"{each}: {found[each]}", flush=True)
    if len(sys.argv) == 1:
        import torch

        write(torch.__version__.partition("+")[0], found)
