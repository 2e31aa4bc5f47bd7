"""Work of minutes: Ctrl-C ends it and breaks nothing, and a bar says how far it is."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
import types

import pytest
import torch
from oracle import assert_same

import torch_scan_hop
from torch_scan_hop import fallback, progress, scan
from torch_scan_hop.reference import scan_loop
from torch_scan_hop.rewrites import using_options

# --- Ctrl-C ---

INTERRUPTED = """
import signal, sys, time
import torch
import torch_scan_hop
from torch_scan_hop import scan
from torch_scan_hop.rewrites import using_options

# what a shell runs in the background ignores it, and so do its children
signal.signal(signal.SIGINT, signal.default_int_handler)
torch_scan_hop.fallback("allow")
# steps of some 20 us, so that no loop is over before the signal; a backward keeps all of them
width = 64 if "backward" in sys.argv else 4096
w = torch.full((width,), 0.9, requires_grad=True)
def cell(h, _):
    return torch.tanh(h * w + 0.1), None
def reading(h, _):
    return torch.tanh(h * w + 0.1) if float(h[0]) < 2 else h, None
def run(cell, length, **options):
    return scan(cell, torch.zeros(width), length=length, **options)[0]
def backward(cell, length):
    out = run(cell, length)
    print("go", flush=True) if length > 100 else None
    return torch.autograd.grad(out.sum(), w)[0]
def without_grad(run):
    with torch.no_grad():
        return run()
kinds = {
    "eager": lambda n: without_grad(lambda: run(cell, n)),
    "backward": lambda n: backward(cell, n),
    "plain loop": lambda n: without_grad(lambda: run(reading, n)),
    "kernel": lambda n: without_grad(lambda: run(cell, 1000 * n, compile=True)),
    "counted loop": lambda n: without_grad(lambda: in_counted_loop(n)),
}
def in_counted_loop(n):
    with using_options(one_kernel=False):
        return run(lambda h, x: cell(h, x), 500 * n, compile=True)
long = {"eager": 150_000, "backward": 100_000, "plain loop": 150_000}
for name in sys.argv[1:]:
    kind = kinds[name]
    want = kind(3)
    kind(5)
    print("go", flush=True) if name != "backward" else None
    try:
        kind(long.get(name, 200_000))
        print("it ended", flush=True)
    except KeyboardInterrupt:
        print(time.time(), flush=True)
    torch.testing.assert_close(kind(3), want)
    torch.testing.assert_close(kind(7), kind(7))
print("all right", flush=True)
"""


@pytest.mark.torch_version
@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT of another process")
@pytest.mark.parametrize(
    "kinds",
    [
        ["eager", "plain loop"],
        pytest.param(["kernel", "counted loop"], marks=pytest.mark.slow),
        pytest.param(["backward"], marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_ends_a_loop_within_a_second_and_breaks_nothing(kinds):
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(INTERRUPTED), *kinds],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for kind in kinds:
            assert child.stdout.readline() == "go\n", child.stderr.read()[-3000:]
            time.sleep(0.4)
            sent = time.time()
            child.send_signal(signal.SIGINT)
            answer = child.stdout.readline()
            assert answer[:1].isdigit(), f"{kind}: {answer}"
            # a loop takes many times that; on a quiet machine it ends in a tenth of a second
            assert float(answer) - sent < 3.0, kind
        assert child.stdout.readline() == "all right\n", child.stderr.read()[-3000:]
    finally:
        child.kill()
        child.communicate()


# --- progress ---


class Bars:
    """A module like ``tqdm.auto``, and what was asked of it."""

    def __init__(self, monkeypatch):
        self.made = []
        module = types.ModuleType("tqdm.auto")
        module.tqdm = self.make
        monkeypatch.setitem(sys.modules, "tqdm", types.ModuleType("tqdm"))
        monkeypatch.setitem(sys.modules, "tqdm.auto", module)

    def make(self, total, desc, unit, initial):
        bar = types.SimpleNamespace(total=total, desc=desc, n=initial, updates=1, is_closed=False)

        def update(n):
            bar.n, bar.updates = bar.n + n, bar.updates + 1

        def close():
            bar.is_closed = True

        bar.update, bar.close, bar.refresh = update, close, lambda: None
        self.made.append(bar)
        return bar

    def take(self):
        """What is known of the bars since the last time, all of which are closed."""
        made, self.made = self.made, []
        assert all(bar.is_closed for bar in made)
        return [(bar.desc, bar.n, bar.total) for bar in made]


@pytest.fixture
def bars(monkeypatch):
    """Of all loops, however short."""
    monkeypatch.setattr(torch_scan_hop.progress_bar, "DELAY", 0)
    return Bars(monkeypatch)


W = torch.linspace(-1, 1, 9).reshape(3, 3)
XS = torch.linspace(0, 1, 600).reshape(100, 2, 3)
H = torch.zeros(2, 3)


def rnn(h, x):
    h = torch.tanh(h @ W + x)
    return h, h


def pointwise(h, x):
    h = torch.tanh(h * 0.5 + x)
    return h, h


def reads(h, x):
    return h + float(x[0, 0]), h


def test_a_call_shows_a_bar(bars):
    assert_same(scan(rnn, H, XS, progress=True), scan_loop(rnn, H, XS, 100, False), 1e-6)
    scan(rnn, H, XS, progress="training", reverse=True)
    assert bars.take() == [("scan", 100, 100), ("training", 100, 100)]
    scan(rnn, H, XS)
    scan(rnn, H, XS, progress=False)
    assert bars.take() == []


def test_a_long_scan_in_blocks_shows_one_bar(bars):
    xs = torch.randn(4000, 8, 64)
    w = torch.randn(64, 64) / 8

    def cell(h, x):
        h = torch.tanh(h @ w + x @ w)
        return h, h

    scan(cell, torch.zeros(8, 64), xs, progress=True)
    assert bars.take() == [("scan", 4000, 4000)]


def test_so_does_its_backward(bars):
    xs = XS.clone().requires_grad_()
    h, hs = scan(rnn, H, xs, progress="training")
    assert bars.take() == [("training", 100, 100)]
    torch.autograd.grad(hs.sum() + h.sum(), xs, retain_graph=True)
    assert bars.take() == [("training, backward", 100, 100)]
    with progress("all"):
        torch.autograd.grad(hs.sum(), xs)
    assert bars.take() == [("all", 100, 100)]


def test_a_backward_that_fails_leaves_no_bar_behind(bars):
    xs = XS.clone().requires_grad_()

    def fail(grad):
        raise RuntimeError("no gradient")

    w = W.clone().requires_grad_()
    w.register_hook(fail)
    hs = scan(lambda h, x: (torch.tanh(h @ w + x),) * 2, H, xs, progress=True)[1]
    with pytest.raises(RuntimeError, match="no gradient"):
        hs.sum().backward()
    bars.take()
    scan(rnn, H, XS)
    assert bars.take() == []


@pytest.mark.torch_version
@pytest.mark.parametrize(
    ("cell", "one_kernel"),
    [(rnn, False), (pointwise, True), pytest.param(rnn, True, marks=pytest.mark.slow)],
)
def test_compiled_loops_move_it(bars, cell, one_kernel):
    want = scan_loop(cell, H, XS, 100, False)
    with using_options(one_kernel=one_kernel):
        assert_same(scan(cell, H, XS, compile=True, progress="one call"), want, 1e-5)
        assert bars.take() == [("one call", 100, 100)]
        program = torch.compile(
            lambda xs: scan(cell, H, xs, progress="of no effect"), fullgraph=True
        )
        assert_same(program(XS), want, 1e-5)
        assert bars.take() == []
        with progress("program"):
            assert_same(program(XS), want, 1e-5)
    assert bars.take() == [("program", 100, 100)]


def test_nested_scans_are_one_bar(bars):
    def outer(h, x):
        h, _ = scan(lambda h, _: (h * 0.5 + x, None), h, length=7, progress=True)
        return h, h

    scan(outer, H, XS, progress=True)
    with fallback("allow"):
        scan(lambda h, x: outer(h, x + float(h.sum())), H, XS, progress=True)
    assert bars.take() == [("scan", 100, 100)] * 2


@pytest.mark.parametrize("checkpoint", ["full", "sqrt", 5])
def test_checkpoints_and_plain_loops_have_one_too(bars, checkpoint):
    w = W.clone().requires_grad_()
    scan(lambda h, x: (torch.tanh(h @ w + x), None), H, XS, progress=True, checkpoint=checkpoint)
    ((_, n, total),) = bars.take()
    assert n == total > 0
    with fallback("allow"):
        scan(reads, H, XS, progress=True)
    with torch_scan_hop.debug():
        scan(rnn, H, XS, progress=True)
    assert bars.take() == [("scan", 100, 100)] * 2


def test_a_kernel_is_called_often_while_somebody_looks(bars, monkeypatch):
    """And once where nobody does; the clock says that each call takes its time."""
    clock = iter(range(10**6))
    monkeypatch.setattr(torch_scan_hop.progress_bar, "perf_counter", lambda: next(clock))
    # a call of 100 steps, each of 18 results of operators, is long
    monkeypatch.setattr(torch_scan_hop.inductor.spans, "WORK_PER_CALL", 18 * 100)
    with using_options():
        scan(pointwise, H, XS, compile=True, progress=True)
    assert bars.made[0].updates > 50


def test_a_short_loop_has_no_bar_and_a_long_one_counts_what_ran_before(bars, monkeypatch):
    """The clock says that every look is a fiftieth of a second after the one before."""
    monkeypatch.setattr(torch_scan_hop.progress_bar, "DELAY", 0.2)
    monkeypatch.setattr(torch_scan_hop.progress_bar, "perf_counter", lambda: 0.0)
    scan(rnn, H, XS, progress=True)
    assert bars.take() == []
    clock = (k / 50 for k in range(10**6))
    monkeypatch.setattr(torch_scan_hop.progress_bar, "perf_counter", lambda: next(clock))
    scan(rnn, H, XS, progress=True)
    assert 80 < bars.made[0].updates < 100
    assert bars.take() == [("scan", 100, 100)]


def test_a_step_costs_nothing(bars):
    """Parts grow as long as they are over soon; the loop asks for the next one only then."""
    with progress():
        parts = list(torch_scan_hop.progress_bar._parts(range(9, -1, -1), 1, 10))
        assert [step for part in parts for step in part] == list(range(9, -1, -1))
        assert [len(part) for part in parts] == [1, 4, 5]
        assert list(torch_scan_hop.progress_bar.steps(range(5, 0, -1))) == [5, 4, 3, 2, 1]


def test_graphs_know_nothing_of_it(bars):
    graphs = []

    def keep(gm, examples):
        graphs.append(gm.print_readable(print_output=False))
        return gm

    for wanted in (None, True):
        torch._dynamo.reset()
        torch.compile(lambda xs, p=wanted: scan(rnn, H, xs, progress=p), backend=keep)(XS)
    assert graphs[0] == graphs[1]
    assert bars.take() == []


def test_without_tqdm_it_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match=r"progress needs tqdm.*pip install tqdm"):
        scan(rnn, H, XS, progress=True)
    assert_same(scan(rnn, H, XS), scan_loop(rnn, H, XS, 100, False), 1e-6)
