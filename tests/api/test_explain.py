"""``explain`` says what is so: its facts are compared with the plan, the operator and Inductor."""

from __future__ import annotations

import gc
import io
import json
import re
import shutil
import subprocess
import warnings
import weakref
from collections import Counter
from html.parser import HTMLParser

import pytest
import torch
from cells import CELLS
from expecttest import assert_expected_inline
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from torch_scan_hop import explain, legality, scan
from torch_scan_hop.capture.replay import history_of
from torch_scan_hop.debugging import debug
from torch_scan_hop.eager import run
from torch_scan_hop.explain.facts import CONTRACTED, LOOP
from torch_scan_hop.rewrites import blocks, using_options

T, B, D, H = 20, 2, 3, 4


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def rnn_cell():
    w, u = leaf(D, H), leaf(H, H)

    def rnn(h, x):
        h = torch.tanh(x @ w + h @ u)
        return h, h

    return rnn


def lstm_cell():
    w, u, b = leaf(D, 4 * H), leaf(H, 4 * H), leaf(4 * H)

    def lstm(state, x):
        i, f, g, o = (x @ w + state["h"] @ u + b).chunk(4, -1)
        c = torch.sigmoid(f) * state["c"] + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return {"h": h, "c": c}, h

    return lstm


def told(explanation: object) -> str:
    """The text without what depends on where this file is and on its lines."""
    return re.sub(r"[^\s(]*(test_explain\.py):\d+", r"\1:N", str(explanation))


def rnn(**options: object):
    return explain(rnn_cell(), torch.zeros(B, H), torch.randn(T, B, D), kernels=False, **options)


# --- what it says ---


def test_an_rnn_in_training_with_limits():
    assert_expected_inline(
        told(rnn(limits=(1e9, 1e9))),
        """\
scan of rnn (test_explain.py:N)
  reverse=False, unroll=1, checkpoint=None
  captured as one operator; no call so far

rnn: 20 steps
  carry    carry  float32[2, 4]  32 B
  x        x      float32[2, 3]  24 B
  y        y      float32[2, 4]  32 B
  closure  w      float32[3, 4]  48 B  grad
  closure  u      float32[4, 4]  64 B  grad

forward: 20 steps
  before the loop, for all steps at once
    mm = mm(x, w)        float32[2, 4]  needs xs only     test_explain.py:N
  in the loop
    mm_1 = mm(carry, u)  float32[2, 4]  depends on carry  test_explain.py:N
    add = add(mm, mm_1)  float32[2, 4]  depends on carry  test_explain.py:N
    tanh = tanh(add)     float32[2, 4]  depends on carry  test_explain.py:N
  a step  112 FLOPs   392 B
  in all  2.2 kFLOPs  6.8 KiB  (at least 1.3 KiB: inputs and results once)
  6.9 us if every operator meets its limit; at least 2.2 us, bound by arithmetic (32%)

backward: 20 steps, backwards
  before the loop, once
    t_1 = t(u)                             float32[4, 4]  the same at every step
  in the loop
    add = add(grad carry, grad y)          float32[2, 4]  depends on grad carry
    tanh_backward = tanh_backward(add, y)  float32[2, 4]  depends on grad carry
    mm_1 = mm(tanh_backward, t_1)          float32[2, 4]  depends on grad carry
  after the loop, as one sum over all steps
    t = t(carry)                           float32[4, 2]  added up in grad u
    mm = mm(t, tanh_backward)              float32[4, 4]  added up in grad u
    t_2 = t(x)                             float32[3, 2]  added up in grad w
    mm_2 = mm(t_2, tanh_backward)          float32[3, 4]  added up in grad w
    add_1 = add(grad w, mm_2)              float32[3, 4]  added up in grad w
    add_2 = add(grad u, mm)                float32[4, 4]  added up in grad u
  a step  176 FLOPs   888 B
  in all  3.5 kFLOPs  8.0 KiB  (at least 2.7 KiB: inputs and results once)
  9.0 us if every operator meets its limit; at least 3.5 us, bound by arithmetic (39%)

kept for the backward: 0 B a step
  0 B for 20 steps
  there anyway
    y      float32[2, 4]  32 B  returned as y  read by t, tanh_backward  test_explain.py:N
    carry  float32[2, 4]  32 B  init           read by t
    x      float32[2, 3]  24 B  xs             read by t
    u      float32[4, 4]  64 B  closed over    read by t""",
    )


def test_an_lstm_in_training():
    init = {"h": torch.zeros(B, H), "c": torch.zeros(B, H)}
    found = explain(lstm_cell(), init, torch.randn(T, B, D), kernels=False)
    assert_expected_inline(
        told(found),
        """\
scan of lstm (test_explain.py:N)
  reverse=False, unroll=1, checkpoint=None
  captured as one operator; no call so far

lstm: 20 steps
  carry    carry['h']  float32[2, 4]   32 B
  carry    carry['c']  float32[2, 4]   32 B
  x        x           float32[2, 3]   24 B
  y        y           float32[2, 4]   32 B
  closure  w           float32[3, 16]  192 B  grad
  closure  u           float32[4, 16]  256 B  grad
  closure  b           float32[16]     64 B   grad

forward: 20 steps
  before the loop, for all steps at once
    mm = mm(x, w)                         float32[2, 16]     needs xs only                         test_explain.py:N
    add_tensor = add(mm, b)               float32[2, 16]     needs xs only                         test_explain.py:N
  in the loop
    mm_1 = mm(carry['h'], u)              float32[2, 16]     depends on carry['h']                 test_explain.py:N
    add_tensor_1 = add(mm_1, add_tensor)  float32[2, 16]     depends on carry['h']                 test_explain.py:N
    split = split(add_tensor_1, 4, -1)    4 x float32[2, 4]  depends on carry['h']                 test_explain.py:N
    sigmoid = sigmoid(split[1])           float32[2, 4]      depends on carry['h']                 test_explain.py:N
    mul = mul(sigmoid, carry['c'])        float32[2, 4]      depends on carry['h'] and carry['c']  test_explain.py:N
    sigmoid_1 = sigmoid(split[0])         float32[2, 4]      depends on carry['h']                 test_explain.py:N
    tanh = tanh(split[2])                 float32[2, 4]      depends on carry['h']                 test_explain.py:N
    mul_1 = mul(sigmoid_1, tanh)          float32[2, 4]      depends on carry['h']                 test_explain.py:N
    add_2 = add(mul, mul_1)               float32[2, 4]      depends on carry['h'] and carry['c']  test_explain.py:N
    sigmoid_2 = sigmoid(split[3])         float32[2, 4]      depends on carry['h']                 test_explain.py:N
    tanh_1 = tanh(add_2)                  float32[2, 4]      depends on carry['h'] and carry['c']  test_explain.py:N
    mul_2 = mul(sigmoid_2, tanh_1)        float32[2, 4]      depends on carry['h'] and carry['c']  test_explain.py:N
  a step  448 FLOPs   2.1 KiB
  in all  9.0 kFLOPs  37.6 KiB  (at least 5.5 KiB: inputs and results once)

backward: 20 steps, backwards
  before the loop, once
    t_1 = t(u)                                                    float32[16, 4]  the same at every step
  before the loop, for all steps at once
    tanh_backward_default = tanh_backward(saved sigmoid_2, s...)  float32[2, 4]   needs xs only
    sigmoid_backward_default = sigmoid_backward(saved tanh_1...)  float32[2, 4]   needs xs only
    tanh_backward_default_1 = tanh_backward(saved sigmoid_1,...)  float32[2, 4]   needs xs only
    sigmoid_backward_default_1 = sigmoid_backward(saved tanh...)  float32[2, 4]   needs xs only
    sigmoid_backward_default_2 = sigmoid_backward(carry['c']...)  float32[2, 4]   needs xs only
  in the loop
    add = add(grad carry['h'], grad y)                            float32[2, 4]   depends on grad carry['h']
    mul_tensor = mul(add, tanh_backward_default)                  float32[2, 4]   depends on grad carry['h']
    add_1 = add(grad carry['c'], mul_tensor)                      float32[2, 4]   depends on grad carry['h'] and grad carry['c']
    mul_tensor_1 = mul(add, sigmoid_backward_default)             float32[2, 4]   depends on grad carry['h']
    mul_tensor_2 = mul(add_1, tanh_backward_default_1)            float32[2, 4]   depends on grad carry['h'] and grad carry['c']
    mul_tensor_3 = mul(add_1, sigmoid_backward_default_1)         float32[2, 4]   depends on grad carry['h'] and grad carry['c']
    mul_4 = mul(add_1, saved sigmoid)                             float32[2, 4]   depends on grad carry['h'] and grad carry['c']
    mul_tensor_4 = mul(add_1, sigmoid_backward_default_2)         float32[2, 4]   depends on grad carry['h'] and grad carry['c']
    cat = cat([mul_tensor_3, mul_tensor_4, mul_tensor_2, mul...)  float32[2, 16]  depends on grad carry['h'] and grad carry['c']
    mm_1 = mm(cat, t_1)                                           float32[2, 4]   depends on grad carry['h'] and grad carry['c']
  after the loop, as one sum over all steps
    sum_1 = sum(cat, [0], True)                                   float32[1, 16]  added up in grad b
    view = reshape(sum_1, [16])                                   float32[16]     added up in grad b
    t = t(carry['h'])                                             float32[4, 2]   added up in grad u
    mm = mm(t, cat)                                               float32[4, 16]  added up in grad u
    t_2 = t(x)                                                    float32[3, 2]   added up in grad w
    mm_2 = mm(t_2, cat)                                           float32[3, 16]  added up in grad w
    add_2 = add(grad w, mm_2)                                     float32[3, 16]  added up in grad w
    add_3 = add(grad u, mm)                                       float32[4, 16]  added up in grad u
    add_4 = add(grad b, view)                                     float32[16]     added up in grad b
  a step  704 FLOPs    4.3 KiB
  in all  14.1 kFLOPs  47.1 KiB  (at least 6.8 KiB: inputs and results once)

kept for the backward: 192 B a step
  3.8 KiB for 20 steps
  kept for it
    carry['c']  float32[2, 4]  32 B  carry into the step  read by mul
    sigmoid     float32[2, 4]  32 B  result of sigmoid    read by mul, sigmoid_backward  test_explain.py:N
    sigmoid_1   float32[2, 4]  32 B  result of sigmoid    read by mul, sigmoid_backward  test_explain.py:N
    tanh        float32[2, 4]  32 B  result of tanh       read by mul, tanh_backward     test_explain.py:N
    sigmoid_2   float32[2, 4]  32 B  result of sigmoid    read by mul, sigmoid_backward  test_explain.py:N
    tanh_1      float32[2, 4]  32 B  result of tanh       read by mul, tanh_backward     test_explain.py:N
  there anyway
    y           float32[2, 4]   32 B   returned as y  read by t  test_explain.py:N
    carry['h']  float32[2, 4]   32 B   init           read by t
    x           float32[2, 3]   24 B   xs             read by t
    u           float32[4, 16]  256 B  closed over    read by t""",
    )


def test_a_linear_recurrence():
    a = torch.rand(H)

    def decay(h, x):
        h = a * h + x
        return h, h

    found = explain(decay, torch.zeros(H), torch.randn(T, H), kernels=False)
    assert_expected_inline(
        told(found),
        """\
scan of decay (test_explain.py:N)
  reverse=False, unroll=1, checkpoint=None
  captured as one operator; no call so far

decay: 20 steps
  carry    carry  float32[4]  16 B
  x        x      float32[4]  16 B
  y        y      float32[4]  16 B
  closure  a      float32[4]  16 B

forward: 20 steps
  in the loop
    mul = mul(a, carry)  float32[4]  depends on carry  test_explain.py:N
    add = add(mul, x)    float32[4]  depends on carry  test_explain.py:N
  a step  0 FLOPs  96 B
  in all  0 FLOPs  1.9 KiB  (at least 688 B: inputs and results once)""",
    )


def test_a_nested_scan():
    inner = rnn_cell()

    def outer(h, xs):
        h, ys = scan(inner, h, xs)
        return h, ys.sum(0)

    with torch.no_grad():
        found = explain(outer, torch.zeros(B, H), torch.randn(5, T, B, D), kernels=False)
    assert_expected_inline(
        told(found),
        """\
scan of outer (test_explain.py:N)
  reverse=False, unroll=1, checkpoint=None
  captured as one operator; no call so far

outer: 5 steps
  carry    carry    float32[2, 4]      32 B
  x        x        float32[20, 2, 3]  480 B
  y        y        float32[2, 4]      32 B
  closure  inner.w  float32[3, 4]      48 B   grad
  closure  inner.u  float32[4, 4]      64 B   grad

forward: 5 steps
  in the loop
    scan = scan(20 steps)      float32[2, 4], float32[20, 2, 4]  a scan of its own               test_explain.py:N
  after the loop, for all steps at once
    sum_1 = sum(scan[1], [0])  float32[2, 4]                     the next step does not need it  test_explain.py:N
  a step  2.2 kFLOPs   8.3 KiB
  in all  11.2 kFLOPs  41.6 KiB  (at least 2.7 KiB: inputs and results once)
    scan: 20 steps
      before the loop, for all steps at once
        mm = mm(x, inner.w)        float32[2, 4]  needs xs only     test_explain.py:N
      in the loop
        mm_1 = mm(carry, inner.u)  float32[2, 4]  depends on carry  test_explain.py:N
        add = add(mm, mm_1)        float32[2, 4]  depends on carry  test_explain.py:N
        tanh = tanh(add)           float32[2, 4]  depends on carry  test_explain.py:N
      a step  112 FLOPs   392 B
      in all  2.2 kFLOPs  6.8 KiB  (at least 1.3 KiB: inputs and results once)""",
    )


def test_a_checkpoint_in_segments():
    assert_expected_inline(
        told(rnn(checkpoint="sqrt")),
        """\
scan of rnn (test_explain.py:N)
  reverse=False, unroll=1, checkpoint='sqrt'
  captured as one operator; no call so far

rnn: 5 steps
  carry    carry  float32[2, 4]     32 B
  x        x      float32[4, 2, 3]  96 B
  y        y      float32[4, 2, 4]  128 B
  closure  w      float32[3, 4]     48 B   grad
  closure  u      float32[4, 4]     64 B   grad

forward: 5 steps
  in the loop
    scan = scan(4 steps)  float32[2, 4], float32[4, 2, 4]  a scan of its own
  a step  448 FLOPs   1.5 KiB
  in all  2.2 kFLOPs  7.7 KiB  (at least 1.4 KiB: inputs and results once)
    scan: 4 steps
      before the loop, for all steps at once
        mm = mm(x, w)        float32[2, 4]  needs xs only     test_explain.py:N
      in the loop
        mm_1 = mm(carry, u)  float32[2, 4]  depends on carry  test_explain.py:N
        add = add(mm, mm_1)  float32[2, 4]  depends on carry  test_explain.py:N
        tanh = tanh(add)     float32[2, 4]  depends on carry  test_explain.py:N
      a step  112 FLOPs  392 B
      in all  448 FLOPs  1.4 KiB  (at least 400 B: inputs and results once)

backward: 5 steps, backwards
  before the loop, once
    zeros = zeros([3, 4], dtype=float32, device=cpu, pin_mem...)  float32[3, 4]                                the same at every step
    zeros_1 = zeros([4, 4], dtype=float32, device=cpu, pin_m...)  float32[4, 4]                                the same at every step
  in the loop
    scan = scan(4 steps)                                          float32[2, 4], float32[4, 2, 4]              a scan of its own
    unsqueeze = unsqueeze(carry, 0)                               float32[1, 2, 4]                             too cheap to be worth a stack
    cat = cat([unsqueeze, scan[1]])                               float32[5, 2, 4]                             reads scan: a scan of its own
    slice_1 = slice(cat, 0, 0, 4)                                 float32[4, 2, 4]                             reads scan: a scan of its own
    scan_1 = scan(4 steps)                                        float32[2, 4], float32[3, 4], float32[4, 4]  a scan of its own
  after the loop, as one sum over all steps
    add = add(grad w, scan_1[1])                                  float32[3, 4]                                added up in grad w
    add_1 = add(grad u, scan_1[2])                                float32[4, 4]                                added up in grad u
  a step  1.2 kFLOPs  5.6 KiB
  in all  5.8 kFLOPs  27.4 KiB  (at least 1.6 KiB: inputs and results once)
    scan: 4 steps
      before the loop, for all steps at once
        mm = mm(x, w)        float32[2, 4]  needs xs only     test_explain.py:N
      in the loop
        mm_1 = mm(carry, u)  float32[2, 4]  depends on carry  test_explain.py:N
        add = add(mm, mm_1)  float32[2, 4]  depends on carry  test_explain.py:N
        tanh = tanh(add)     float32[2, 4]  depends on carry  test_explain.py:N
      a step  112 FLOPs  392 B
      in all  448 FLOPs  1.4 KiB  (at least 400 B: inputs and results once)
    scan_1: 4 steps, backwards
      before the loop, once
        t_1 = t(u)                                float32[4, 4]  the same at every step
      in the loop
        add = add(carry[0], x[0])                 float32[2, 4]  depends on carry[0]
        tanh_backward = tanh_backward(add, x[3])  float32[2, 4]  depends on carry[0]
        mm_1 = mm(tanh_backward, t_1)             float32[2, 4]  depends on carry[0]
      after the loop, as one sum over all steps
        t = t(x[1])                               float32[4, 2]  added up in carry[2]
        mm = mm(t, tanh_backward)                 float32[4, 4]  added up in carry[2]
        t_2 = t(x[2])                             float32[3, 2]  added up in carry[1]
        mm_2 = mm(t_2, tanh_backward)             float32[3, 4]  added up in carry[1]
        add_1 = add(carry[1], mm_2)               float32[3, 4]  added up in carry[1]
        add_2 = add(carry[2], mm)                 float32[4, 4]  added up in carry[2]
      a step  176 FLOPs  888 B
      in all  704 FLOPs  2.0 KiB  (at least 832 B: inputs and results once)

kept for the backward: 32 B a step
  160 B for 5 steps
  kept for it
    carry  float32[2, 4]  32 B  carry into the step  read by scan, unsqueeze
  there anyway
    x  float32[4, 2, 3]  96 B  xs           read by scan
    w  float32[3, 4]     48 B  closed over  read by scan
    u  float32[4, 4]     64 B  closed over  read by scan

checkpoint='sqrt'
  saves 160 B instead of 0 B; each step's forward runs once more
  and 128 B while a segment is differentiated""",
    )


def printing(h, x):
    h = h + x
    print(h)
    return h, h


def branching(h, x):
    if h.sum() > 0:
        h = h + x
    return h, h


@pytest.mark.parametrize(
    ("body", "line", "fix"),
    [
        (printing, "print(h)", "Print after the scan, from ys, or run it under fallback."),
        (branching, "if h.sum() > 0:", "Choose with torch.where, or keep the value a tensor."),
    ],
)
def test_a_loop(body, line, fix):
    found = explain(body, torch.zeros(3), torch.ones(4, 3))
    assert not found.captured and not found.scans
    assert found.reason and "test_explain.py" not in found.reason
    assert re.fullmatch(rf".*test_explain\.py:\d+: {re.escape(line)}", found.line)
    assert found.fix == fix
    for part in (found.reason, found.line, fix):
        assert part in str(found)
    json.dumps(found.to_dict())
    assert "plain Python loop" in found.to_html()


def test_a_loop_that_is_remembered():
    body = lambda h, x: (printing(h, x)[0], None)  # noqa: E731
    with torch.no_grad(), pytest.warns(UserWarning, match="could not be traced"):
        scan(body, torch.zeros(3), torch.ones(4, 3))
    assert explain(body, torch.zeros(3), torch.ones(4, 3)).line.endswith("print(h)")


def test_a_body_without_a_derivative_is_a_loop():
    """As in a call: the loop runs, and its backward raises."""
    w = leaf(3)

    def body(h, x):
        squared = torch.exp(h * w)
        y = squared.clone()
        squared.mul_(x)
        return squared, y

    found = explain(body, torch.zeros(3), torch.ones(4, 3), kernels=False)
    assert not found.captured and "modified by an inplace operation" in found.reason


def test_debug_is_a_reason():
    with debug():
        found = rnn()
    assert not found.captured and "debug() is in force" in found.reason


def test_what_was_captured_anew():
    kind = ["add"]

    def body(h, x):
        return (h + x, None) if kind[0] == "add" else (h * x, None)

    for kind[0] in ("add", "multiply", "times"):
        scan(body, torch.zeros(3), torch.ones(4, 3))
    found = explain(body, torch.zeros(3), torch.ones(4, 3), kernels=False)
    assert found.captures is not None and found.captures.count == 3
    first, second = found.captures.guards
    assert re.fullmatch(r"kind\[0\] == 'add', at test_explain.py:\d+ in body", first), first
    assert re.fullmatch(r"kind\[0\] == 'multiply', at test_explain.py:\d+ in body", second)
    assert "captured anew" in str(found) and "3 captures" in str(found)


# --- it is so ---


def plans_of_a_run(monkeypatch, problem):
    """The plans and blocks that a run in training makes use of."""
    plans, lengths = [], []
    plan_of, block_length = run.plan_of, run.block_length

    def recorded_plan(*args):
        plans.append(plan_of(*args).plan)
        return plan_of(*args)

    def recorded_length(*args, **kwargs):
        lengths.append(block_length(*args, **kwargs))
        return lengths[-1]

    monkeypatch.setattr(run, "plan_of", recorded_plan)
    monkeypatch.setattr(run, "block_length", recorded_length)
    carry, ys = scan(problem.combine_fn, problem.init, problem.xs)
    results = torch.utils._pytree.tree_leaves((carry, ys))
    sum(r.sum() for r in results if r is not None and r.requires_grad).backward()
    monkeypatch.undo()
    return plans, lengths


def operators(graph: torch.fx.Graph) -> Counter[str]:
    targets = [n.target for n in graph.nodes if n.op == "call_function"]
    names = [getattr(t, "overloadpacket", t).__name__ for t in targets]
    return Counter(name for name in names if name != "getitem")


def _changes_and_cells():
    """Each cell, and two of them with other options; the largest is a slow test."""
    for changes in ({}, {"batch_xs": False}, {"memory_gate": 0.0}):
        for name in ("tanh_rnn", "lstm", "gru", "selective_ssm", "transformer"):
            is_slow = name == "transformer" or (changes and name not in ("lstm", "selective_ssm"))
            yield pytest.param(changes, name, marks=pytest.mark.slow if is_slow else ())


@pytest.mark.parametrize(("changes", "name"), list(_changes_and_cells()))
def test_places_are_those_of_the_plan(monkeypatch, name, changes):
    problem = CELLS[name].problem(torch.float32, T=40, B=3)
    with using_options(**changes):
        found = explain(problem.combine_fn, problem.init, problem.xs, kernels=False)
        plans, lengths = plans_of_a_run(monkeypatch, problem)
    loops = found.scans[0].loops
    assert [loop.block or 40 for loop in loops] == lengths
    for loop, plan in zip(loops, plans, strict=True):
        in_loop = [o.call.partition("(")[0] for o in loop.operators if o.place == LOOP]
        assert Counter(in_loop) == operators(plan.body.graph)
        assert len(loop.operators) == sum(operators(plan.original.graph).values())
        assert all(o.why for o in loop.operators)
        sums = [o for o in loop.operators if o.place == CONTRACTED]
        assert bool(sums) == bool(plan.decisions.accumulators)


def test_blocks_are_those_of_the_run(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 2**12)
    problem = CELLS["lstm"].problem(torch.float32, T=400, B=3)
    found = explain(problem.combine_fn, problem.init, problem.xs, kernels=False)
    monkeypatch.undo()
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 2**12)
    block = [loop.block for loop in found.scans[0].loops]
    lengths = []
    block_length = run.block_length
    record = lambda *a, **k: lengths.append(block_length(*a, **k)) or lengths[-1]  # noqa: E731
    monkeypatch.setattr(run, "block_length", record)
    scan(problem.combine_fn, problem.init, problem.xs)[1].sum().backward()
    assert block == lengths and max(lengths) < 400
    assert f"in blocks of {lengths[0]}" in str(found)


def saved_bytes(call) -> int:
    """What operators save for their backward: all of it, once for each tensor that is saved."""
    sizes = []

    def pack(value):
        sizes.append(value.nbytes)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        call()
    return sum(sizes)


@pytest.mark.parametrize("checkpoint", [None, "full"])
@pytest.mark.parametrize("name", ["tanh_rnn", "lstm", "gru", "linear_recurrence", "selective_ssm"])
def test_residuals_are_what_is_saved(name, checkpoint):
    problem = CELLS[name].problem(torch.float32, T=T, B=3)
    found = explain(
        problem.combine_fn, problem.init, problem.xs, checkpoint=checkpoint, kernels=False
    )
    memory = found.scans[0].memory
    said = sum(r.nbytes * (T if r.per_step else 1) for r in memory.residuals)
    call = lambda: scan(problem.combine_fn, problem.init, problem.xs, checkpoint=checkpoint)  # noqa: E731
    assert said == saved_bytes(call)
    assert memory.nbytes == T * sum(r.nbytes for r in memory.residuals if r.kept)


def test_residuals_name_their_operators_and_lines():
    (memory,) = [s.memory for s in explain_lstm().scans]
    kept = {r.name: r for r in memory.residuals if r.kept}
    assert kept["tanh"].source == "result of tanh" and "tanh_backward" in kept["tanh"].read_by
    assert "torch.sigmoid(i) * torch.tanh(g)" in kept["tanh"].line
    assert kept["carry['c']"].source == "carry into the step"


def explain_lstm(**options: object):
    init = {"h": torch.zeros(B, H), "c": torch.zeros(B, H)}
    return explain(lstm_cell(), init, torch.randn(T, B, D), kernels=False, **options)


def test_a_checkpoint_saves():
    plain, full = explain_lstm(), explain_lstm(checkpoint="full")
    assert full.checkpoint.nbytes_without == plain.scans[0].memory.nbytes
    assert full.checkpoint.nbytes == full.scans[0].memory.nbytes < full.checkpoint.nbytes_without
    segments = explain_lstm(checkpoint=4)
    assert segments.checkpoint.nbytes == 4 * 2 * B * H * 4
    assert segments.checkpoint.nbytes_of_segment > 0


def test_flops_of_products():
    forward, backward = rnn().scans[0].loops
    assert forward.work.flops == 2 * B * (D + H) * H * T
    assert backward.work.flops == 2 * B * (D + H + H) * H * T


@pytest.mark.parametrize("name", ["lstm", "transformer", "stacked_layers"])
def test_flops_are_those_that_torch_counts(name):
    problem = CELLS[name].problem(torch.float32, T=5, B=2)
    # a loop does without the gradient of the first carry, where nobody wants it
    problem.init = torch.utils._pytree.tree_map(lambda c: c.requires_grad_(), problem.init)
    found = explain(problem.combine_fn, problem.init, problem.xs, kernels=False)
    with FlopCounterMode(display=False) as counter:
        carry, ys = scan(problem.combine_fn, problem.init, problem.xs)
        leaves = torch.utils._pytree.tree_leaves((carry, ys))
        sum(v.sum() for v in leaves if v is not None).backward()
    assert sum(loop.work.flops for loop in found.scans[0].loops) == counter.get_total_flops()


def test_limits_bound_the_time():
    slow_memory, slow_arithmetic = rnn(limits=(1e15, 1e6)), rnn(limits=(1e6, 1e15))
    for found, limit in ((slow_memory, "memory"), (slow_arithmetic, "arithmetic")):
        for loop in found.scans[0].loops:
            work = loop.work
            assert work.limit == limit and 0 < work.fraction_of_limit <= 1
            assert work.fraction_of_limit == work.least_seconds / work.seconds
    work = slow_arithmetic.scans[0].loops[0].work
    assert work.least_seconds == work.flops / 1e6


# --- why ---


def reasons(body, **changes) -> dict[str, str]:
    with using_options(**changes):
        found = explain(body, torch.zeros(B, H), torch.randn(T, B, H), kernels=False)
    return {o.name: o.why for o in found.scans[0].loops[0].operators if o.place == LOOP}


def test_reasons_for_what_stays():
    w = torch.randn(H, H)

    def cell(h, x):
        h = torch.tanh(x @ w + h @ w.t())
        return h, torch.exp(h) @ w

    stays = reasons(cell)
    assert stays["mm_1"] == "depends on carry" and "mm" not in stays
    assert reasons(cell, batch_xs=False)["mm"] == "batch_xs is switched off"
    assert reasons(cell, sink_outputs=False)["exp"] == "sink_outputs is switched off"
    assert reasons(cell, hoist_invariant=False)["t"] == "hoist_invariant is switched off"
    assert reasons(cell, memory_gate=0.0)["mm"].startswith("memory gate: a stack of mm ")


def test_operators_without_a_rule_and_random_ones_are_named():
    def cell(h, x):
        noise = torch.rand_like(h)
        return h + x.kthvalue(2, -1, True).values + noise, h.kthvalue(1).values

    stays = reasons(cell)
    assert stays["kthvalue"] == "no trusted batching rule for kthvalue"
    assert stays["kthvalue_1"] == "no trusted batching rule for kthvalue"
    assert {why for why in stays.values() if why.startswith("random")}


# --- kernels ---


def kernels(body, **changes):
    with using_options(**changes), torch.no_grad():
        found = explain(body, torch.zeros(B, H), torch.randn(T, B, H))
    return [(k.kind, k.why_not) for k in found.scans[0].kernels]


def test_a_pointwise_body_is_one_kernel():
    decay = lambda h, x: (0.5 * h + x, h)  # noqa: E731
    assert kernels(decay) == [("one kernel, lane by lane", {})]
    off = "one_kernel is switched off"
    ((kind, why_not),) = kernels(decay, one_kernel=False)
    assert kind == "a counted loop" and set(why_not.values()) == {off}


def test_a_body_that_is_no_kernel_says_why():
    ((kind, why_not),) = kernels(lambda h, x: (torch.cumsum(h, -1) + x, h))
    assert kind == "a counted loop"
    assert why_not["one kernel, lane by lane"] == "not pointwise: cumsum"
    assert why_not["one kernel, row by row"] == "no product"
    w = torch.randn(H, H)
    ((_, why_not),) = kernels(lambda h, x: (h @ w + x, h))
    assert why_not["one kernel, lane by lane"] == "not pointwise: addmm"


def test_kernels_are_those_that_inductor_takes():
    from torch_scan_hop.inductor.watch import watching

    body, init, xs = rnn_cell(), torch.zeros(B, H), torch.randn(T, B, D)
    said = [k.kind for k in explain(body, init, xs).scans[0].kernels]
    taken = []
    compiled = torch.compile(lambda init, xs: scan(body, init, xs), fullgraph=True)
    no_caches = torch._inductor.config.patch(force_disable_caches=True)
    with watching(lambda _, kernel, __: taken.append(kernel)), no_caches:
        compiled(init, xs)[1].sum().backward()
    assert [kind != "a counted loop" for kind in said] == [k is not None for k in taken]


def test_a_random_body_is_lowered():
    found = explain(
        lambda h, x: (h + torch.rand_like(h) * x, None), torch.zeros(3), torch.ones(T, 3)
    )
    assert [k.kind for k in found.scans[0].kernels] == ["one kernel, lane by lane"]


# --- forms ---


@pytest.mark.parametrize("name", CELLS)
def test_facts_are_json_and_a_page(name):
    problem = CELLS[name].problem(torch.float32, T=6, B=2)
    found = explain(problem.combine_fn, problem.init, problem.xs, kernels=False)
    facts = found.to_dict()
    assert json.loads(json.dumps(facts)) == facts
    check_page(found)


class Page(HTMLParser):
    """Raises where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.boxes: list[dict[str, str]] = []
        self.edges: list[dict[str, str]] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        found = dict(attrs)
        self.attributes += attrs
        kinds = (found.get("class") or "").split()
        self.boxes += [found] if "box" in kinds else []
        self.edges += [found] if "edge" in kinds and "data-from" in found else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def check_page(found) -> Page:
    page = Page(found.to_html())
    drawn = Counter(box["data-key"] for box in page.boxes)
    loops = [loop for s in found.scans for loop in s.loops]
    for loop in loops:
        for op in loop.operators:
            assert drawn[op.name] and op.call in page.text
    assert all(edge["data-from"] in drawn and edge["data-to"] in drawn for edge in page.edges)
    assert not [name for name, _ in page.attributes if name in ("src", "href", "xlink:href")]
    assert not re.search(r"https?://|@import|url\(", found.to_html())
    return page


def test_the_page(tmp_path):
    found = explain_lstm()
    found.to_html(tmp_path / "lstm.html")
    assert (tmp_path / "lstm.html").read_text(encoding="utf-8") == found.to_html()
    page = check_page(found)
    assert any("loop" in (v or "").split() for k, v in page.attributes if k == "class")
    assert found._repr_html_() in found.to_html()


def test_names_are_escaped():
    found = explain(
        lambda c, x: ({"<b>&": c["<b>&"] + x}, None), {"<b>&": torch.zeros(2)}, torch.ones(4, 2)
    )
    assert "carry['<b>&']" in Page(found.to_html()).text


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
CHECK = """
<script>
  var svg = document.querySelector('svg'), boxes = [...svg.querySelectorAll('.box')];
  var named = key => boxes.find(b => b.dataset.key === key);
  var apart = boxes.every(a => boxes.every(b => {
    if (a === b) return true;
    var p = a.getBoundingClientRect(), q = b.getBoundingClientRect();
    return p.right <= q.left || q.right <= p.left || p.bottom <= q.top || q.bottom <= p.top;
  }));
  var within = boxes.every(b => {
    var p = b.getBoundingClientRect(), q = svg.getBoundingClientRect();
    return p.left >= q.left && p.right <= q.right && p.bottom <= q.bottom;
  });
  var down = [...svg.querySelectorAll('.edge[data-from]')].every(e =>
    named(e.dataset.from).getBoundingClientRect().bottom
      <= named(e.dataset.to).getBoundingClientRect().top);
  named('mm').dispatchEvent(new Event('mouseenter'));
  var near = boxes.filter(b => b.classList.contains('near')).map(b => b.dataset.key).sort();
  var inSum = getComputedStyle(named('add').querySelector('rect')).stroke;
  document.title = JSON.stringify({apart, within, down, near, color: inSum});
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser")
def test_the_page_in_a_browser(tmp_path):
    found = rnn()
    page = tmp_path / "page.html"
    page.write_text(found.to_html().replace("</body>", CHECK + "</body>"), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'user'}"]
    done = subprocess.run(
        [CHROMIUM, *flags, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120
    )
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert title, done.stderr[-2000:]
    seen = json.loads(title[1].replace("&quot;", '"'))
    (x, w) = [v.node for v in found.scans[0].loops[0].inputs if v.name in ("x", "w")]
    assert seen["apart"] and seen["within"] and seen["down"]
    assert seen["near"] == sorted(["mm", "add", x, w])
    assert seen["color"] == "rgb(168, 84, 8)"  # known step by step


def test_colours_are_for_terminals():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    found = rnn()
    plain, coloured = io.StringIO(), Terminal()
    found.show(plain)
    found.show(coloured)
    assert plain.getvalue() == f"{found}\n" and "\033" not in str(found)
    assert re.sub(r"\033\[\d+m", "", coloured.getvalue()) == plain.getvalue()
    assert "\033[34m" in coloured.getvalue()


# --- nothing is run, nothing is left ---


def test_nothing_is_run_and_nothing_is_left():
    seen = torch.zeros(H)
    w = leaf(H, H)

    def body(h, x):
        seen.mul_(0.5).add_(x.mean(0))
        return torch.tanh(h @ w + torch.rand_like(x)), h

    init, xs = torch.zeros(B, H), torch.randn(T, B, H)
    scan(body, init, xs)
    sizes = [(torch.zeros(n, H), torch.randn(T, n, H)) for n in (1, 2, 3)]
    before, state, captures = seen.clone(), torch.get_rng_state(), history_of(body)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for inputs in sizes:
            found = explain(body, *inputs)
    assert found.captured and found.scans[0].signature[1].path == "seen (written)"
    assert torch.equal(seen, before) and torch.equal(torch.get_rng_state(), state)
    assert w.grad is None and history_of(body) == captures
    scan(body, init, xs)
    assert history_of(body) == captures


def test_a_first_call_after_it_is_captured_as_ever():
    body = rnn_cell()
    explain(body, torch.zeros(B, H), torch.randn(T, B, D), kernels=False)
    assert history_of(body) == []
    for n in (2, 3, 4):  # the second size makes the batch symbolic, as it does without explain
        scan(body, torch.zeros(n, H), torch.randn(T, n, D))
    assert len(history_of(body)) == 2


def test_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(legality, "check_after_each", None)  # it keeps what it has seen

    def once() -> tuple[weakref.ref[object], weakref.ref[object]]:
        body = rnn_cell()
        weight = body.__closure__[0].cell_contents
        explain(body, torch.zeros(B, H), torch.randn(T, B, D), kernels=False)
        return weakref.ref(body), weakref.ref(weight)

    found = once()
    gc.collect()
    assert all(ref() is None for ref in found)


# --- programs ---


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(D, H)

    def forward(self, xs):
        def step(h, x):
            h = self.cell(x, h)
            return h, h

        return scan(step, torch.zeros(xs.shape[1], H), xs * 2)[1].sum(-1)


def test_an_exported_program():
    steps = torch.export.Dim("T", min=2, max=100)
    program = torch.export.export(
        Model(), (torch.randn(T, B, D),), dynamic_shapes=({0: steps},), strict=False
    )
    found = explain(program)
    (only,) = found.scans
    closures = [v.path for v in only.signature if v.role == "closure"]
    assert sorted(closures) == [
        f"cell.{n}" for n in ("bias_hh", "bias_ih", "weight_hh", "weight_ih")
    ]
    assert f"T steps (here T = {T})" in str(found) and "eval_with_key" not in str(found)
    assert only.steps == f"T = {T}" and only.loops[0].work.flops == 2 * B * (D + H) * H * T
    json.dumps(found.to_dict())
    check_page(found)
    assert explain(program.graph_module, kernels=False).scans[0].loops[0].operators


def test_a_compiled_module():
    model = Model()
    compiled = torch.compile(model, backend="eager")
    found = explain(compiled, (torch.randn(T, B, D),), kernels=False)
    (only,) = found.scans
    assert [loop.name for loop in only.loops] == ["forward", "backward"]
    assert "cell.weight_ih" in [v.path for v in only.signature]
    function = torch.compile(lambda xs: model(xs) + 1, backend="eager")
    assert len(explain(function, (torch.randn(T, B, D),), kernels=False).scans) == 1


def test_a_compiled_program_that_cannot_be_one_graph():
    def program(x):
        print(x)
        return x

    found = explain(torch.compile(program, backend="eager"), (torch.ones(2),))
    assert not found.captured and found.line.endswith("print(x)")


def test_a_program_without_a_scan():
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    assert "it holds no scan" in str(explain(gm))


# --- calls ---


@pytest.mark.parametrize(
    ("options", "n_scans"),
    [({"unroll": 3}, 2), ({"reverse": True}, 1), ({"checkpoint": 3}, 2), ({"length": T}, 1)],
)
def test_options_of_scan(options, n_scans):
    found = rnn(**options)
    assert len(found.scans) == n_scans
    assert sum(s.loops[0].work.flops for s in found.scans) == 2 * B * (D + H) * H * T


def test_a_carry_of_numbers_without_xs():
    found = explain(lambda c, _: (c + 1, c), 0, None, 7, kernels=False)
    assert [(v.role, v.path, v.type) for v in found.scans[0].signature] == [
        ("carry", "carry", "int64[]"),
        ("x", "(step)", "float32[0]"),
        ("y", "y", "int64[]"),
    ]


def test_another_dimension():
    found = explain(rnn_cell(), torch.zeros(B, H), torch.randn(B, T, D), dim=1, kernels=False)
    assert found.scans[0].steps == str(T)


def test_errors_name_the_argument():
    body, init, xs = rnn_cell(), torch.zeros(B, H), torch.randn(T, B, D)
    with pytest.raises(TypeError, match="explain: init is missing"):
        explain(body)
    with pytest.raises(TypeError, match="explain: limits must be"):
        explain(body, init, xs, limits=3.0)
    with pytest.raises(ValueError, match="explain: limits must be two positive"):
        explain(body, init, xs, limits=(0, 1))
    with pytest.raises(TypeError, match="explain: kernels must be"):
        explain(body, init, xs, kernels="inductor")
    with pytest.raises(TypeError, match="explain: init must be the tuple"):
        explain(torch.compile(body, backend="eager"), init, xs)
    with pytest.raises(TypeError, match="init"):
        explain(body, "h", xs)
    with pytest.raises(ValueError, match="length=3 disagrees"):
        explain(body, init, xs, 3)


# --- state, and a first step of its own ---


class Leaky(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.v, self.steps = None, 0

    def forward(self, x):
        self.steps += 1
        self.v = torch.tanh(x + (0 if self.v is None else self.v))
        return self.v


@pytest.mark.torch_version
def test_state_is_named_and_stays_as_it_was():
    cell = Leaky()
    for before in (None, torch.zeros(4)):
        cell.v = before
        (found,) = explain(lambda _, x: (None, cell(x)), None, torch.ones(5, 4)).scans
        names = [leaf.path for leaf in found.signature if leaf.role == "carry"]
        assert names == ["attribute 'steps' of a Leaky", "attribute 'v' of a Leaky"]
        assert ("the first step is on its own" in found.note) == (before is None)
        assert cell.v is before and cell.steps == 0


@pytest.mark.torch_version
def test_what_is_appended_to_a_list_is_among_the_ys():
    kept = [0.5]

    def cell(h, x):
        h = torch.tanh(h + x)
        kept.append((h, h.sum().item()))
        return h, h * 2

    (found,) = explain(cell, torch.zeros(4), torch.ones(5, 4)).scans
    names = [leaf.path for leaf in found.signature]
    assert names == ["carry", "x", "y", *["appended to a list"] * 2] and kept == [0.5]


@pytest.mark.torch_version
def test_a_first_step_of_its_own_is_told_of():
    def differences(before, x):
        return x, x if before is None else x - before

    told = explain(differences, None, torch.ones(5, 4))
    (found,) = told.scans
    assert found.note.endswith("before these: after it carry differs")
    assert [leaf.path for leaf in found.signature] == ["carry", "x", "y"]
    assert "the first step is on its own" in str(told)


@pytest.mark.parametrize("start", [None, torch.zeros(3)])
def test_what_requires_a_gradient_and_is_read_detached(start):
    """There is no backward to explain."""
    w = torch.randn(3, 3, requires_grad=True)

    def cell(h, x):
        return (h if h is None else h * 0.9), x @ w.detach()

    (facts,) = explain(cell, start, torch.randn(4, 3)).scans
    assert [loop.name for loop in facts.loops] == ["forward"]
