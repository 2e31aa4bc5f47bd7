"""What a long-lived program counts on: nothing leaks, threads and forks work, types are checked."""

from __future__ import annotations

import gc
import linecache
import os
import subprocess
import sys
import textwrap
import types
import warnings
from pathlib import Path

import pytest
import torch
from oracle import assert_same
from resident import least_growth
from threads import results_of_threads
from torch import fx

from torch_scan_hop import scan
from torch_scan_hop._torch.fakes import FakeTensor
from torch_scan_hop.reference import scan_loop

ROOT = Path(__file__).parents[2]
H, XS = torch.zeros(2), torch.linspace(0, 1, 12).reshape(6, 2)

# --- leaks ---


def alive() -> dict[str, int]:
    """How many graphs, fakes and other tensors there are."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when they are asked for their class
        found = [type(o) for o in gc.get_objects()]
    tensors = [t for t in found if issubclass(t, torch.Tensor)]
    return {
        "graphs": sum(issubclass(t, (fx.Graph, fx.GraphModule)) for t in found),
        "nodes": sum(issubclass(t, fx.Node) for t in found),
        "fakes": sum(issubclass(t, FakeTensor) for t in tensors),
        "tensors": sum(not issubclass(t, FakeTensor) for t in tensors),
    }


def train(cell, xs, **options):
    w = torch.full((2,), 0.5, requires_grad=True)
    h, _ = scan(lambda h, x: cell(h * w, x), H, xs, **options)
    h.sum().backward()


def call_often(n: int) -> None:
    for k in range(n):
        train(lambda h, x: (torch.tanh(h + x), h), XS[: 3 + k % 4])


#: as a notebook's cell has it, run again: the same text, another function
REDEFINED = """
def cell(h, x):
    return torch.tanh(h + x * {number}), h
"""


#: a module, as __main__ is: of one without a name Dynamo keeps the variables for ever
NOTEBOOK = types.ModuleType("notebook_of_this_test")
NOTEBOOK.torch = torch
sys.modules[NOTEBOOK.__name__] = NOTEBOOK


def redefine(n: int) -> None:
    for k in range(n):
        name = f"<cell {k % 3}>"
        text = REDEFINED.format(number=k % 3 + 1)
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        exec(compile(text, name, "exec"), NOTEBOOK.__dict__)
        w = torch.full((2,), 0.5, requires_grad=True)
        scan(NOTEBOOK.cell, H * w, XS)[0].sum().backward()


@pytest.mark.parametrize(
    "n", [200, pytest.param(10_000, marks=pytest.mark.slow)], ids=lambda n: f"{n} calls"
)
def test_calls_leave_nothing_behind(n):
    call_often(n // 5)
    gc.collect()
    gc.freeze()  # what other tests left, and may go meanwhile, is not counted
    try:
        growth = least_growth(lambda: call_often(n), enough=10e6)
        assert alive() == {"graphs": 0, "nodes": 0, "fakes": 0, "tensors": 0}
        assert growth < 10e6
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(
    "n", [6, pytest.param(200, marks=pytest.mark.slow)], ids=lambda n: f"{n} redefinitions"
)
def test_a_cell_that_is_defined_again_lets_go_of_its_captures(n):
    """But for what torch keeps of each function that it compiled: guards, in a finalizer of every
    long-lived object that they name, and with them the fakes of its inputs."""
    redefine(14)  # some caches hold the last few
    before = alive()
    redefine(n)
    after = alive()
    assert after["graphs"] <= 1.2 * before["graphs"]
    assert after["nodes"] <= 1.2 * before["nodes"]
    assert after["tensors"] == before["tensors"]
    assert after["fakes"] - before["fakes"] <= 4 * n + 60
    most = 20e6 + 0.3e6 * n
    assert least_growth(lambda: redefine(n), enough=most) < most


# --- threads and forks ---


def test_threads_may_call_and_differentiate_scans_at_once():
    """One cell and others, captured by whoever comes first; the numbers are the loop's."""

    def shared(h, x):
        h = torch.tanh(h + x)
        return h, h * 2

    def work(number: int) -> None:
        def own(h, x):
            h = torch.sin(h * number + x)
            return h, h * number

        for k in range(4):
            for cell in (shared, own):
                xs = (XS[: 3 + k] * (number + 1)).requires_grad_()
                results = scan(cell, H, xs), scan_loop(cell, H, xs, 3 + k, False)
                grads = [torch.autograd.grad(ys.sum() + h.sum(), xs)[0] for h, ys in results]
                assert_same(*results, 1e-6)
                assert_same(*grads, 1e-6)

    results_of_threads(work, 4)


FORK = """
import os, sys
import torch, torch_scan_hop
from torch_scan_hop import scan
H, XS = torch.zeros(2), torch.ones(6, 2)
cell = lambda h, x: (torch.tanh(h + x), h)
def run(cell):
    w = torch.ones(2, requires_grad=True)
    h, hs = scan(lambda h, x: cell(h * w, x), H, XS)
    return torch.autograd.grad(h.sum() + hs.sum(), w)[0]
{before}
child = os.fork()
if child == 0:
    code = 1
    try:
        one, other = run(cell), run(lambda h, x: (torch.sin(h + x), h))
        loop, w = [], torch.ones(2, requires_grad=True)
        h = H
        for x in XS:
            loop.append(h * w)
            h = torch.tanh(h * w + x)
        want = torch.autograd.grad(h.sum() + sum(y.sum() for y in loop), w)[0]
        torch.testing.assert_close(one, want)
        assert other.isfinite().all()
        code = 0
    except BaseException:
        import traceback; traceback.print_exc(); sys.stderr.flush()
    finally:
        os._exit(code)
assert os.waitpid(child, 0)[1] == 0
run(cell)
print("both are well")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize(
    "before",
    ["scan(cell, H, XS)", pytest.param("", marks=pytest.mark.slow)],
    ids=["after a call", "before the first call"],
)
def test_a_forked_process_captures_and_runs(before):
    """With one thread, and no backward in the parent: torch's own are gone in a child, and builds
    with CUDA refuse to run one there."""
    result = subprocess.run(
        [sys.executable, "-c", FORK.format(before=before)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.stdout == "both are well\n", result.stderr[-3000:]


# --- types, seen from outside ---

USERS_CODE = """
import torch
import torch_scan_hop
from torch_scan_hop import Binomial, scan

def cell(h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return h + x, h

carry, ys = scan(cell, torch.zeros(2), torch.ones(3, 2), reverse=True, checkpoint=Binomial(2))
with torch_scan_hop.debug(detect_nonfinite=True), torch_scan_hop.set_default(compile=True):
    layers = torch_scan_hop.scan_layers([torch.nn.Linear(2, 2)], torch.ones(2))
text: str = torch_scan_hop.explain(cell, torch.zeros(2), torch.ones(3, 2)).to_html()
"""


def test_a_type_checker_sees_our_types_from_outside(tmp_path):
    api = pytest.importorskip("mypy.api")
    (tmp_path / "right.py").write_text(textwrap.dedent(USERS_CODE))
    (tmp_path / "wrong.py").write_text(
        "import torch_scan_hop\ntorch_scan_hop.scan(reverse='yes')\n"
    )
    options = ["--no-incremental", "--follow-imports=silent", "--cache-dir", os.devnull]
    # torch itself is not looked into: that takes a minute
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n")
    options += ["--config-file", str(tmp_path / "mypy.ini"), "--strict"]
    options += ["--allow-untyped-calls", "--allow-any-generics"]
    os.environ["MYPYPATH"] = str(ROOT)
    try:
        right, _, _ = api.run([*options, str(tmp_path / "right.py")])
        wrong, _, _ = api.run([*options, str(tmp_path / "wrong.py")])
    finally:
        del os.environ["MYPYPATH"]
    assert right.startswith("Success"), right
    assert "import-untyped" not in wrong and 'incompatible type "str"' in wrong, wrong
    assert (ROOT / "torch_scan_hop" / "py.typed").exists()
