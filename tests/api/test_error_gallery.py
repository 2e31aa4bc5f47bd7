"""Every message that a newcomer's mistake gives, pinned; and the same message under compile first."""

from __future__ import annotations

import re
import subprocess
import sys
import traceback
import warnings

import mistakes
import pytest
import torch
from expecttest import TestCase

import torch_scan_hop

PACKAGE = torch_scan_hop.__path__[0]
ALL = {**mistakes.ARGUMENTS, **mistakes.BODIES, **mistakes.LOOPS, **mistakes.OTHERS}


def raised_by(call):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except Exception as error:
            return error
    raise AssertionError("no error")


def message_of(error):
    """Without what differs between machines and versions: folders, line numbers, addresses."""
    text = re.sub(r"(/[\w.-]+)+/([\w.]+\.py):\d+", r"\2", str(error))
    return re.sub(r" \(Detected.*?flow\.\)| \(Dynamo does not know.*?False\)\)?", "", text)


def gallery(names):
    parts = []
    for name in names:
        error = raised_by(ALL[name])
        parts.append(f"{name}: {type(error).__name__}\n    {message_of(error)}\n")
    return "\n" + "".join(parts)


class TestGallery(TestCase):
    maxDiff = None

    def test_arguments(self):
        self.assertExpectedInline(
            gallery(mistakes.ARGUMENTS),
            """\

combine_fn is a number: ScanTypeError
    scan: combine_fn must be callable as combine_fn(carry, x), but got int. The first argument is the function.
combine_fn is None: ScanTypeError
    scan: combine_fn must be callable as combine_fn(carry, x), but got None. The first argument is the function.
combine_fn and init swapped: ScanTypeError
    scan: combine_fn must be callable as combine_fn(carry, x), but got float32[2]. The first argument is the function.
combine_fn is a module's class: ScanTypeError
    scan: combine_fn must be a module, but got the class GRUCell. Make one outside the scan.
combine_fn is async: ScanTypeError
    scan: combine_fn must be a function, but is async. Drop async.
init is a string: ScanTypeError
    scan: init must be a tensor, a number or None, but got str. Close over other values instead of carrying them.
init is a set: ScanTypeError
    scan: init must be a tensor, a number or None, but got set. Close over other values instead of carrying them.
init is an array: ScanTypeError
    scan: init must be a tensor, a number or None, but got ndarray. Convert it with torch.from_numpy(...).
init holds a string: ScanTypeError
    scan: init['name'] must be a tensor, a number or None, but got str. Close over other values instead of carrying them.
init holds a string in a named tuple: ScanTypeError
    scan: init.second must be a tensor, a number or None, but got str. Close over other values instead of carrying them.
init holds a function: ScanTypeError
    scan: init[1][0] must be a tensor, a number or None, but got builtin_function_or_method. Close over other values instead of carrying them.
xs is an array: ScanTypeError
    scan: xs must be a tensor or None, but got ndarray. Convert it with torch.from_numpy(...).
xs is a range: ScanTypeError
    scan: xs must be a tensor or None, but got range. Pass torch.arange(...), or length=... for so many steps without xs.
xs is a number: ScanTypeError
    scan: xs must be a tensor or None, but got int. Close over values that do not change from step to step.
xs is a list of numbers: ScanTypeError
    scan: xs[0] must be a tensor or None, but got float. Close over values that do not change from step to step.
xs holds a number: ScanTypeError
    scan: xs['k'] must be a tensor or None, but got float. Close over values that do not change from step to step.
xs is a scalar: ScanValueError
    scan: dim=0 is out of range for xs, which is float32[] with 0 dimensions.
xs of two lengths: ScanValueError
    scan: all xs must have one size along dim=0, but xs['a'] has 3 and xs['b'][0] has 4.
a list of tensors of two lengths: ScanValueError
    scan: all xs must have one size along dim=0, but xs[0] has 2 and xs[1] has 3.
neither xs nor length: ScanValueError
    scan: xs holds no tensor, so there is no trip count. Pass length=T.
xs of None and no length: ScanValueError
    scan: xs holds no tensor, so there is no trip count. Pass length=T.
length is a tensor: ScanTypeError
    scan: length must be an int, but got int64[].
length is a float: ScanTypeError
    scan: length must be an int, but got float.
length is negative: ScanValueError
    scan: length must not be negative, but got -1.
length disagrees: ScanValueError
    scan: length=4 disagrees with xs['a'], whose size along dim=0 is 3. Leave length out, or slice xs.
dim is too large: ScanValueError
    scan: dim=2 is out of range for xs['a'], which is float32[3, 2] with 2 dimensions.
dim is too small: ScanValueError
    scan: dim=-3 is out of range for xs, which is float32[3, 2] with 2 dimensions.
dim is a tuple: ScanTypeError
    scan: dim must be an int, but got tuple.
reverse is a number: ScanTypeError
    scan: reverse must be True or False, but got int.
unroll is zero: ScanValueError
    scan: unroll must be at least 1, but got 0.
unroll is a string: ScanTypeError
    scan: unroll must be an int, but got str.
unroll is True: ScanTypeError
    scan: unroll must be an int, but got bool.
checkpoint is True: ScanTypeError
    scan: checkpoint must be None, 'full', 'sqrt', a number of segments, a Binomial or a policy function, but got True.
checkpoint is unknown: ScanTypeError
    scan: checkpoint must be None, 'full', 'sqrt', a number of segments, a Binomial or a policy function, but got 'everything'.
checkpoint is zero: ScanValueError
    scan: checkpoint must be at least 1 segment, but got 0.
snapshots are a string: ScanTypeError
    scan: the snapshots and sweeps of a Binomial must be ints, but checkpoint is Binomial('a', 2).
no snapshots: ScanValueError
    scan: checkpoint must have at least 1 snapshot and 1 sweep, but got Binomial(0, 2).
compile is a string: ScanTypeError
    scan: compile must be True or False, but got str.
progress is a number: ScanTypeError
    scan: progress must be True, False, None or a label (a string), but got int.
""",
        )

    def test_bodies(self):
        self.assertExpectedInline(
            gallery(mistakes.BODIES),
            """\

it returns nothing: ScanTypeError
    scan: combine_fn must return a pair (carry, y), but it returned None. Return (carry, None) if there is nothing to stack. combine_fn is <lambda> (mistakes.py).
it returns the carry alone: ScanTypeError
    scan: combine_fn must return a pair (carry, y), but it returned float32[2]. Return (carry, None) if there is nothing to stack. combine_fn is <lambda> (mistakes.py).
it is a cell of torch's: ScanTypeError
    scan: combine_fn must return a pair (carry, y), but it returned float32[1, 2]. Return (carry, None) if there is nothing to stack. combine_fn is forward (rnn.py).
it returns three values: ScanTypeError
    scan: combine_fn must return a pair (carry, y), but it returned a tuple of length 3. Return (carry, None) if there is nothing to stack. combine_fn is <lambda> (mistakes.py).
it is a generator: ScanTypeError
    scan: combine_fn must return a pair (carry, y), but it returned generator. Return (carry, None) if there is nothing to stack. combine_fn is generated (mistakes.py).
it returns y first: ScanTypeError
    scan: carry must keep its structure, shape and dtype from step to step: expected float32[2] (from init), but combine_fn returned None. Return (carry, y), the carry first, in the structure of init. combine_fn is <lambda> (mistakes.py).
another shape: ScanValueError
    scan: carry['h'] must keep its structure, shape and dtype from step to step: expected float32[2] (from init), but combine_fn returned float32[1]. Give init the shape of the carry that combine_fn returns, or reshape what it returns. combine_fn is <lambda> (mistakes.py).
a shape by broadcasting: ScanValueError
    scan: carry must keep its structure, shape and dtype from step to step: expected float32[] (from init), but combine_fn returned float32[2]. Give init the shape of the carry that combine_fn returns, or reshape what it returns. combine_fn is <lambda> (mistakes.py).
another dtype: ScanTypeError
    scan: carry[1] must keep its structure, shape and dtype from step to step: expected float32[2] (from init), but combine_fn returned float64[2]. Convert init with init.to(torch.float64), or the returned carry with .to(torch.float32). combine_fn is <lambda> (mistakes.py).
another device: ScanValueError
    scan: carry must stay on one device from step to step: expected cpu (from init), but combine_fn returned a tensor on meta. Move init with init.to('meta'), or the returned carry with .to('cpu'). combine_fn is <lambda> (mistakes.py).
half precision: ScanTypeError
    scan: carry must keep its structure, shape and dtype from step to step: expected float32[2] (from init), but combine_fn returned float16[2]. Convert init with init.to(torch.float16), or the returned carry with .to(torch.float32). combine_fn is <lambda> (mistakes.py).
an integer divided: ScanTypeError
    scan: carry must keep its structure, shape and dtype from step to step: expected int64[] (from init), but combine_fn returned float32[]. Convert init with init.to(torch.float32), or the returned carry with .to(torch.int64). combine_fn is <lambda> (mistakes.py).
another container: ScanTypeError
    scan: carry must keep its structure, shape and dtype from step to step: expected a tuple (from init), but combine_fn returned list. Return (carry, y), the carry first, in the structure of init. combine_fn is <lambda> (mistakes.py).
another length: ScanTypeError
    scan: carry must keep its structure, shape and dtype from step to step: expected a tuple of length 2 (from init), but combine_fn returned length 1. Return (carry, y), the carry first, in the structure of init. combine_fn is <lambda> (mistakes.py).
other keys: ScanTypeError
    scan: carry must keep its structure, shape and dtype from step to step: expected the keys ['h'] (from init), but combine_fn returned the keys ['c']. Return (carry, y), the carry first, in the structure of init. combine_fn is <lambda> (mistakes.py).
a key more: ScanTypeError
    scan: carry must keep its structure, shape and dtype from step to step: expected the keys ['h'] (from init), but combine_fn returned the keys ['h', 'c']. Return (carry, y), the carry first, in the structure of init. combine_fn is <lambda> (mistakes.py).
a tensor for a dict: ScanTypeError
    scan: carry must keep its structure, shape and dtype from step to step: expected a dict with keys ['h'] (from init), but combine_fn returned float32[2]. Return (carry, y), the carry first, in the structure of init. combine_fn is <lambda> (mistakes.py).
a dict for a tensor: ScanTypeError
    scan: carry must keep its structure, shape and dtype from step to step: expected float32[2] (from init), but combine_fn returned dict. Return (carry, y), the carry first, in the structure of init. combine_fn is <lambda> (mistakes.py).
None for a tensor: ScanTypeError
    scan: carry[1] must keep its structure, shape and dtype from step to step: expected float32[2] (from init), but combine_fn returned None. Return (carry, y), the carry first, in the structure of init. combine_fn is <lambda> (mistakes.py).
a tensor for None: ScanTypeError
    scan: carry[1] must keep its structure, shape and dtype from step to step: expected None (from init), but combine_fn returned float32[2]. Return (carry, y), the carry first, in the structure of init. combine_fn is in_turn (mistakes.py).
a string for a tensor: ScanTypeError
    scan: carry must keep its structure, shape and dtype from step to step: expected float32[2] (from init), but combine_fn returned str. Return (carry, y), the carry first, in the structure of init. combine_fn is <lambda> (mistakes.py).
a vector for a number: ScanValueError
    scan: carry must keep its structure, shape and dtype from step to step: expected a scalar tensor (from init), but combine_fn returned float32[2]. Give init the shape of the carry that combine_fn returns, or reshape what it returns. combine_fn is <lambda> (mistakes.py).
a string in y: ScanTypeError
    scan: y['a'][0] that combine_fn returns must be a tensor, a number or None, but is str. Return it outside the scan, or convert it to a tensor. combine_fn is <lambda> (mistakes.py).
a function in y: ScanTypeError
    scan: y[0] that combine_fn returns must be a tensor, a number or None, but is builtin_function_or_method. Return it outside the scan, or convert it to a tensor. combine_fn is <lambda> (mistakes.py).
""",
        )

    def test_others(self):
        self.assertExpectedInline(
            gallery(mistakes.OTHERS),
            """\

fallback is misspelt: ScanValueError
    fallback: mode must be one of ('error', 'warn', 'allow'), but got 'eror'.
an unknown default: ScanTypeError
    set_default: no default is called 'unroll'; there is compile, detect_nonfinite.
a default of another type: ScanTypeError
    set_default: compile must be True or False, but got int.
accelerate_torch of a string: ScanTypeError
    accelerate_torch: on must be True or False, but got str.
debug of a string: ScanTypeError
    debug: detect_nonfinite must be True or False, but got str.
progress of a number: ScanTypeError
    progress: label must be a string, but got int. It stands before the bar; leave it out for none of your own.
a layer that is none: ScanTypeError
    scan_layers: layers must be modules, but layers[1] is str.
layers of two widths: ScanValueError
    scan_layers: all layers must compute the same function of their parameters, but layers[1].out_features is 3, while in layers[0] it is 2. Call layers[1] on its own, or run one scan_layers for each kind of layer.
layers of two kinds: ScanValueError
    scan_layers: all layers must compute the same function of their parameters, but layers[1] is a Tanh, while in layers[0] it is a Linear. Call layers[1] on its own, or run one scan_layers for each kind of layer.
layers that change the width: ScanValueError
    scan_layers: a layer must return what it takes, but layers[0] takes float32[2] and returned float32[3]. Call layers that change the shape on their own.
the operator with a tensor for init: ScanTypeError
    torch.ops.higher_order.scan: init must be a list or tuple of tensors, but got float32[2]. For pytrees there is torch_scan_hop.scan.
the operator without xs: ValueError
    torch.ops.higher_order.scan: xs is empty, so there is no trip count. Pass a tensor of shape [T, 0], or call torch_scan_hop.scan(..., length=T).
the operator with xs of two lengths: ScanValueError
    torch.ops.higher_order.scan: all xs must have one size along dimension 0, but xs[0] is float32[3, 2] and xs[1] is float32[4, 2].
the operator with a carry that shrinks: ScanTypeError
    torch.ops.higher_order.scan: carry[0] must keep its shape and dtype from step to step: expected float32[2] (from init), but combine_fn returned float32[1].
the operator with a carry too few: ScanTypeError
    torch.ops.higher_order.scan: combine_fn must return 2 carries and then its ys, in a flat tuple, but returned 1.
torch.fx.symbolic_trace: ScanTypeError
    scan: xs must be a tensor or None, but got Proxy. torch.fx.symbolic_trace runs no operators: use torch.export, or make_fx.
""",
        )


def test_there_are_enough():
    assert len(ALL) >= 60


@pytest.mark.parametrize("name", mistakes.LOOPS)
def test_loops(name):
    """torch's part of the reason differs from version to version; ours names the line and the fix."""
    text = str(raised_by(mistakes.LOOPS[name]))
    assert "mistakes.py:" in text and text.startswith(("scan: y", "torch_scan_hop: "))


@pytest.mark.torch_version
@pytest.mark.parametrize("name", [*mistakes.ARGUMENTS, *mistakes.BODIES])
def test_under_compile_the_same_is_said_first(name):
    eager = raised_by(ALL[name])
    if "class GRUCell" in str(eager) or "async" in str(eager):
        pytest.skip("Dynamo meets these before we do")
    torch._dynamo.reset()
    compiled = raised_by(torch.compile(ALL[name], backend="eager", fullgraph=True))
    said = str(eager).partition(" combine_fn is ")[0]
    assert isinstance(compiled, TypeError if isinstance(eager, TypeError) else ValueError)
    assert str(compiled).startswith(said)


def test_a_users_own_error_has_the_users_frames():
    def helper(x):
        raise KeyError("mine")

    def body(h, x):
        return helper(x), h

    error = raised_by(lambda: torch_scan_hop.scan(body, mistakes.H, mistakes.XS))
    assert type(error) is KeyError
    frames = traceback.extract_tb(error.__traceback__)
    assert [f.name for f in frames[-2:]] == ["body", "helper"]
    assert sum(f.filename.startswith(PACKAGE) for f in frames) <= 3


def test_a_list_of_tensors_for_xs_is_explained():
    error = raised_by(lambda: torch_scan_hop.scan(mistakes.add, mistakes.H, [torch.ones(2)] * 3))
    notes = getattr(error, "__notes__", None) or [str(error)]
    assert any("pass torch.stack(xs)" in note for note in notes)


@pytest.mark.filterwarnings("default:torch_scan_hop")
def test_jit_trace_records_the_loop():
    with pytest.warns(UserWarning, match="use torch.export"):
        traced = torch.jit.trace(
            lambda x: torch_scan_hop.scan(mistakes.add, mistakes.H, x)[0], mistakes.XS
        )
    torch.testing.assert_close(traced(mistakes.XS * 2), mistakes.XS.sum(0) * 2)


TWO_MISTAKES = """
import torch
from torch_scan_hop import scan
w = torch.randn(8, 16)
for h in (torch.zeros(4, 16), torch.zeros(4, 8, dtype=torch.double)):
    try:
        scan(lambda h, x: (torch.tanh(x @ w + h @ w), h), h, torch.randn(10, 4, 8))
    except RuntimeError as error:
        print("raised")
"""


@pytest.mark.torch_version
def test_the_error_is_all_there_is_to_read():
    """torch logs what its fakes raise, and prints a graph's code, before anyone catches that."""
    done = subprocess.run(
        [sys.executable, "-c", TWO_MISTAKES], capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "raised\nraised\n", done.stderr[-3000:]
    assert not re.search("FX-traced|failed while attempting|Traceback", done.stderr), done.stderr
