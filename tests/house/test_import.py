"""Importing the package: what it costs, what it leaves to the first call, and in which order."""

from __future__ import annotations

import subprocess
import sys

import pytest

PRELUDE = """
import sys
import torch
CELL = lambda h, x: (torch.tanh(h + x), h * x)
H, XS = torch.zeros(2), torch.linspace(0, 1, 6).reshape(3, 2)
def loop(h, xs):
    ys = []
    for x in xs:
        h, y = CELL(h, x)
        ys.append(y)
    return h, torch.stack(ys)
def is_right(run):
    torch.testing.assert_close(run(H, XS), loop(H, XS))
"""


def run(code: str, *options: str) -> str:
    result = subprocess.run(
        [sys.executable, *options, "-c", PRELUDE + code],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout + result.stderr


def test_nothing_else_is_imported_with_it():
    """Not Dynamo, nor Inductor, sympy, or anything that torch has not imported itself."""
    code = """
before = set(sys.modules)
import torch_scan_hop
more = {name for name in set(sys.modules) - before if name.partition(".")[0] != "torch_scan_hop"}
print("heavy:", sorted(name for name in more if name.startswith("torch.")), "sympy" in more)
assert "torch._dynamo" in before or "torch._dynamo" not in sys.modules
assert "torch._inductor" in before or "torch._inductor" not in sys.modules
"""
    assert run(code) == "heavy: [] False\n"


def test_importing_and_calling_it_warns_of_nothing():
    code = """
import torch_scan_hop
is_right(lambda h, xs: torch_scan_hop.scan(CELL, h, xs))
w = torch.ones(2, requires_grad=True)
torch_scan_hop.scan(lambda h, x: (h * w + x, h), H, XS)[1].sum().backward()
"""
    assert run(code, "-W", "error") == ""


USES = """
import torch_scan_hop
from torch_scan_hop import scan
program = lambda h, xs: scan(CELL, h, xs)
is_right(torch.compile(program, backend="eager", fullgraph=True))
class Program(torch.nn.Module):
    def forward(self, h, xs):
        return program(h, xs)
exported = torch.export.export(Program(), (H, XS), strict=True)
assert "scan" in str(exported.graph), exported.graph
is_right(exported.module())
is_right(program)
try:
    torch.compile(lambda xs: scan(CELL, "no tensor", xs), backend="eager", fullgraph=True)(XS)
except TypeError as error:
    assert "init" in str(error), error
else:
    raise AssertionError("the tracker of refusals is not registered")
"""

AT_ONCE = """
import importlib, threading
failures = []
start = threading.Barrier(3)
def take(module):
    start.wait()
    try:
        importlib.import_module(module)
    except BaseException as error:
        failures.append(error)
names = ["torch_scan_hop", "torch._dynamo", "torch._dynamo.variables.higher_order_ops"]
threads = [threading.Thread(target=take, args=(name,)) for name in names]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failures, failures
"""


@pytest.mark.torch_version
@pytest.mark.parametrize(
    "before",
    [
        "",
        pytest.param(AT_ONCE, marks=pytest.mark.slow),
        pytest.param("import torch._dynamo", marks=pytest.mark.slow),
        pytest.param("import torch_scan_hop, torch._dynamo", marks=pytest.mark.slow),
    ],
    ids=["package alone", "at once", "Dynamo first", "package first"],
)
def test_dynamo_knows_our_operators_in_every_order(before):
    """Before any call in eager mode, which would import Dynamo itself."""
    run(before + USES)


def test_dynamo_is_loaded_as_it_was_found():
    """The hook leaves no trace in its module, and looking for a module is not importing it."""
    code = """
import importlib.util
import torch_scan_hop
assert importlib.util.find_spec("torch._dynamo").name == "torch._dynamo"
assert "torch._dynamo" not in sys.modules
import torch._dynamo
assert "exec_module" not in vars(torch._dynamo.__spec__.loader)
assert torch._dynamo.__file__.endswith("__init__.py")
"""
    run(code)


@pytest.mark.torch_version
def test_the_first_call_may_be_in_any_context():
    """It imports Dynamo, whose modules make what they keep outside of the caller's modes."""
    run("""
from torch.utils.flop_counter import FlopCounterMode
from torch_scan_hop import scan
program = lambda h, xs: scan(CELL, h, xs)
hs = torch.stack([H, H + 1])
with torch.device("meta"), torch.inference_mode(), FlopCounterMode(display=False):
    got = torch.func.vmap(lambda h: program(h, XS))(hs)
torch.testing.assert_close(got[0][1], loop(H + 1, XS)[0])
is_right(program)
is_right(torch.compile(program, backend="aot_eager", fullgraph=True))
""")


@pytest.mark.torch_version
def test_the_first_calls_may_be_in_several_threads():
    """One imports Dynamo, and the others wait, where they would find a part of it and judge that."""
    run("""
import threading, time
from torch_scan_hop import fallback, scan
right, start = [], threading.Barrier(4)
def work(k):
    start.wait()
    time.sleep(0.15 * k)
    with fallback("error"):
        is_right(lambda h, xs: scan(CELL, h, xs))
    right.append(k)
threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(right) == 4
""")
