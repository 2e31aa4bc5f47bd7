"""torch_scan_hop.nn beside torch.nn, and beside a Python loop over each sequence alone."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.utils._pytree as pytree
from oracle import assert_same, gradients
from torch import nn
from torch.nn.modules import rnn  # torch_xla puts a GRU of its own into torch.nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import torch_scan_hop.nn as ours_nn
from torch_scan_hop import scan
from torch_scan_hop.nn import Bidirectional, LayerNormLSTMCell, Recurrent, Stack, convert

pytestmark = pytest.mark.torch_version
T, B, D, H = 6, 4, 3, 5
LENGTHS = [3, 6, 1, 4]
KINDS = ["LSTM", "GRU", "RNN"]
FORMS = {
    "plain": {},
    "two layers": {"num_layers": 2},
    "bidirectional": {"bidirectional": True, "num_layers": 2},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False, "bidirectional": True},
    "relu": {"nonlinearity": "relu"},
    "projected": {"proj_size": 2, "num_layers": 2, "bidirectional": True},
}
OF_ONE_KIND = {"relu": "RNN", "projected": "LSTM"}
#: each kind, and each form, once; the others take minutes
QUICK = {("RNN", "relu"), ("GRU", "no bias"), ("LSTM", "projected")}
ALL = [
    pytest.param(k, f, marks=[] if (k, f) in QUICK else pytest.mark.slow)
    for k in KINDS
    for f in FORMS
    if OF_ONE_KIND.get(f, k) == k
]
GIVEN = pytest.mark.parametrize(
    "given", [pytest.param(False, marks=pytest.mark.slow), True], ids=["zeros", "hx"]
)


def pair(kind, form="plain", **how):
    """torch.nn's layer, and ours with what it saved."""
    options = {**FORMS[form], **how}
    torchs, ours = (getattr(m, kind)(D, H, **options) for m in (rnn, ours_nn))
    ours.load_state_dict(torchs.state_dict())
    return torchs, ours


def states(layer, B=B):
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    h = torch.randn(count, B, layer.proj_size or H)
    return (h, torch.randn(count, B, H)) if layer.mode == "LSTM" else h


def values_and_gradients(layer, x, hx, call=None):
    leaves = [*pytree.tree_leaves((x, hx)), *layer.parameters()]
    leaves = [leaf.requires_grad_() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    results = (layer if call is None else call)(x, hx)
    return results, gradients(results, leaves)


def check(torchs, ours, x, hx, call=None):
    expected, grads = values_and_gradients(torchs, x, hx)
    got, got_grads = values_and_gradients(ours, x, hx, call)
    assert_same(got, expected, 1e-6)
    assert_same(got_grads, grads, 1e-5)


@GIVEN
@pytest.mark.parametrize(("kind", "form"), ALL)
def test_a_batch(kind, form, given):
    torchs, ours = pair(kind, form)
    x = torch.randn(B, T, D) if torchs.batch_first else torch.randn(T, B, D)
    check(torchs, ours, x, states(torchs) if given else None)


@GIVEN
@pytest.mark.parametrize(("kind", "form"), ALL)
def test_one_sequence_without_a_batch(kind, form, given):
    torchs, ours = pair(kind, form)
    hx = pytree.tree_map(lambda leaf: leaf[:, 0], states(torchs)) if given else None
    check(torchs, ours, torch.randn(T, D), hx)


@GIVEN
@pytest.mark.parametrize(("kind", "form"), ALL)
def test_packed_sequences_in_any_order(kind, form, given):
    torchs, ours = pair(kind, form)
    x, hx = torch.randn(T, B, D), states(torchs) if given else None

    def call(layer, x, hx):
        packed, state = layer(pack_padded_sequence(x, LENGTHS, enforce_sorted=False), hx)
        return packed, state

    expected, grads = values_and_gradients(torchs, x, hx, functools.partial(call, torchs))
    got, got_grads = values_and_gradients(ours, x, hx, functools.partial(call, ours))
    assert_same(pytree.tree_leaves(got), pytree.tree_leaves(expected), 1e-6)
    assert type(got[0]) is type(expected[0])
    assert_same(got_grads, grads, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_sorted_packed_sequences_and_batch_first(kind):
    torchs, ours = pair(kind, "batch first")
    packed = pack_padded_sequence(torch.randn(B, T, D), [6, 4, 4, 1], batch_first=True)
    (expected, state), (got, got_state) = torchs(packed), ours(packed)
    assert got.sorted_indices is None
    assert_same((got.data, got_state), (expected.data, state), 1e-6)


@pytest.mark.parametrize(("kind", "form"), ALL)
def test_lengths_are_what_packing_is(kind, form):
    """And what stands in the padding reaches nothing."""
    torchs, ours = pair(kind, form)
    x, hx = torch.randn(T, B, D), states(torchs)
    padding = torch.arange(T)[:, None] >= torch.tensor(LENGTHS)
    spoilt = x.masked_fill(padding[..., None], float("nan"))
    if ours.batch_first:
        spoilt = spoilt.transpose(0, 1)

    def packed(x, hx):
        packed = pack_padded_sequence(x, LENGTHS, enforce_sorted=False)
        ys, state = torchs(packed, hx)
        return pad_packed_sequence(ys, batch_first=torchs.batch_first)[0], state

    expected, grads = values_and_gradients(torchs, x, hx, packed)
    call = functools.partial(ours, lengths=torch.tensor(LENGTHS))
    got, got_grads = values_and_gradients(ours, spoilt, hx, call)
    assert_same(got, expected, 1e-6)
    if ours.batch_first:
        got_grads = [got_grads[0].transpose(0, 1), *got_grads[1:]]
    assert_same(got_grads, grads, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_length_of_zero_keeps_the_state(kind):
    _, ours = pair(kind, "bidirectional")
    hx = states(ours)
    ys, state = ours(torch.full((T, B, D), float("nan")), hx, lengths=[0] * B)
    assert_same(state, hx)
    assert not ys.any()


def test_no_steps_and_no_sequences():
    _, ours = pair("GRU")
    ys, state = ours(torch.randn(0, B, D), hx := states(ours), lengths=[0] * B)
    assert ys.shape == (0, B, H)
    assert_same(state, hx)
    none = torch.zeros(0, dtype=torch.int64)
    assert ours(torch.randn(T, 0, D), lengths=none)[0].shape == (T, 0, H)


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), 0.0], ids=str)
@pytest.mark.parametrize("lengths", [LENGTHS, [0, 6, 0, 2], [0] * 4], ids=["some", "zero", "all"])
def test_a_cell_that_is_singular_at_zero(lengths, spoilt):
    """Where a cell ran on zeros in the padding, weights would get the gradient 0 * inf."""
    w = torch.randn(D, D, requires_grad=True)

    def cell(x, h):
        return torch.tanh(h @ w + (x * w[0]).norm(dim=-1, keepdim=True).log() + x.sqrt())

    x, h = torch.rand(T, B, D) + 0.5, torch.randn(B, D)
    padding = (torch.arange(T)[:, None] >= torch.tensor(lengths))[..., None]
    got = [x.masked_fill(padding, spoilt), h.clone()]
    ys, last = Recurrent(cell)(*[leaf.requires_grad_() for leaf in got], lengths=lengths)
    grads = gradients((ys, last), [*got, w])
    x, h = x.requires_grad_(), h.requires_grad_()
    ends = []
    stacks = torch.zeros(T, B, D)
    for b, length in enumerate(lengths):
        own = h[b : b + 1]
        for t in range(length):
            own = cell(x[t, b : b + 1], own)
            stacks = torch.index_put(stacks, (torch.tensor(t), torch.tensor(b)), own[0])
        ends.append(own)
    expected = stacks, torch.cat(ends)
    assert_same((ys, last), expected, 1e-5)
    leaves = [x, h, w]
    none = map(torch.zeros_like, leaves)
    want = [z if g is None else g for g, z in zip(gradients(expected, leaves), none, strict=True)]
    assert_same(grads, want, 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_between_layers(kind):
    torchs, ours = pair(kind, num_layers=3, dropout=0.4)
    x = torch.randn(T, B, D)
    results = []
    for layer in (torchs, ours):
        torch.manual_seed(0)
        results.append(layer(x))
    assert_same(results[1], results[0], 1e-6)
    torchs.eval(), ours.eval()
    assert_same(ours(x), torchs(x), 1e-6)


WRONG = {
    "a dimension": lambda kind: ((torch.randn(T, B, 2, D),), {}),
    "a width": lambda kind: ((torch.randn(T, B, D + 1),), {}),
    "a dtype": lambda kind: ((torch.randn(T, B, D, dtype=torch.float64),), {}),
    "hx without a batch": lambda kind: (
        (torch.randn(T, B, D), hidden(kind, torch.zeros(1, H))),
        {},
    ),
    "hx with a batch": lambda kind: ((torch.randn(T, D), hidden(kind, torch.zeros(1, B, H))), {}),
    "hx of another size": lambda kind: (
        (torch.randn(T, B, D), hidden(kind, torch.zeros(1, B, H + 1))),
        {},
    ),
}


def hidden(kind, h):
    return (h, h) if kind == "LSTM" else h


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_calls_get_torchs_words(kind, wrong):
    torchs, ours = pair(kind)
    args, kwargs = WRONG[wrong](kind)
    with pytest.raises(Exception) as expected:
        torchs(*args, **kwargs)
    with pytest.raises(type(expected.value)) as got:
        ours(*args, **kwargs)
    assert str(got.value) == str(expected.value)


def error_of(make, *args, **kwargs):
    try:
        make(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)
    return None


@pytest.mark.parametrize(
    "how",
    [
        {"proj_size": 9},
        {"dropout": 2},
        {"num_layers": 0},
        {"nonlinearity": "gelu"},
        {"bias": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_arguments_get_torchs_words(kind, how):
    expected = error_of(getattr(rnn, kind), D, H, **how)
    if expected is None:
        # torch 2.9 does not look at every one
        assert how == {"bias": 1}
    assert error_of(getattr(ours_nn, kind), D, H, **how) == expected


@pytest.mark.parametrize("given", [False, True], ids=["zeros", "hx"])
@pytest.mark.parametrize(
    ("kind", "form"), [*((k, "two layers") for k in KINDS), ("LSTM", "projected")]
)
def test_autocast(kind, form, given):
    """As torch.nn's own loop: with oneDNN, it needs a processor that has bfloat16."""
    torchs, ours = pair(kind, form)
    x, hx = torch.randn(T, B, D), states(torchs) if given else None
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.backends.mkldnn.flags(enabled=False):
        expected, got = torchs(x, hx), ours(x, hx)
    assert_same(got, expected, 2e-2)


def test_wrong_lengths():
    _, ours = pair("GRU")
    x = torch.randn(T, B, D)
    with pytest.raises(ValueError, match=r"each of the 4 sequences, but got int64\[2\]"):
        ours(x, lengths=[1, 2])
    for wrong, named in (([6, -1, 2, 3], r"lengths\[1\] is -1"), ([1, 2, 3, 7], r"\[3\] is 7")):
        with pytest.raises(
            ValueError, match=f"between 0 and 6, the number of steps, but .*{named}"
        ):
            ours(x, lengths=wrong)
        with pytest.raises(ValueError, match=named):
            Recurrent(nn.GRUCell(D, H))(x, lengths=torch.tensor(wrong))
    with pytest.raises(TypeError, match="lengths of its own"):
        ours(pack_padded_sequence(x, [T] * B), lengths=LENGTHS)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled(kind, backend):
    torchs, ours = pair(kind, "bidirectional")
    x, hx = torch.randn(T, B, D), states(torchs)
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    check(torchs, ours, x, hx, compiled)
    call = torch.compile(
        lambda x, hx, lengths: ours(x, hx, lengths=lengths), backend=backend, fullgraph=True
    )
    lengths = torch.tensor(LENGTHS)
    assert_same(call(x, hx, lengths), ours(x, hx, lengths=lengths), 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_exported_for_any_trip_count(kind):
    torchs, ours = pair(kind, "bidirectional")
    dims = {0: torch.export.Dim("T", min=2, max=50)}
    program = torch.export.export(ours.eval(), (torch.randn(T, B, D),), dynamic_shapes=(dims,))
    for steps in (3, 9):
        x = torch.randn(steps, B, D)
        assert_same(program.module()(x), torchs(x), 1e-6)


def test_exported_with_lengths_for_any_trip_count():
    ours = ours_nn.GRU(D, H)
    dims = {"input": {0: torch.export.Dim("T", min=2, max=50)}, "lengths": None}
    x, lengths = torch.randn(T, B, D), torch.tensor(LENGTHS)
    program = torch.export.export(ours, (x,), {"lengths": lengths}, dynamic_shapes=dims)
    x = torch.randn(9, B, D)
    assert_same(program.module()(x, lengths=lengths + 3), ours(x, lengths=lengths + 3), 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_many_models_at_once(kind):
    _, ours = pair(kind, "two layers")
    weights = {k: torch.stack([p, p * 0.5, -p]).detach() for k, p in ours.named_parameters()}
    x = torch.randn(T, B, D)

    def run(weights, x):
        return torch.func.functional_call(ours, weights, (x,))

    got = torch.vmap(run, in_dims=(0, None))(weights, x)
    for k in range(3):
        one = {name: w[k] for name, w in weights.items()}
        assert_same(pytree.tree_map(lambda leaf, k=k: leaf[k], got), run(one, x), 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives(kind):
    _, ours = pair(kind, "bidirectional")
    ours = ours.double()
    x = torch.randn(3, 2, D, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([3, 2])
    run = lambda x: ours(x, lengths=lengths)[0].sin().sum()  # noqa: E731
    assert torch.autograd.gradgradcheck(run, (x,), atol=1e-4)


def test_packed_sequences_have_second_derivatives():
    _, ours = pair("LSTM")
    ours = ours.double()
    x = torch.randn(3, 2, D, dtype=torch.float64, requires_grad=True)
    run = lambda x: ours(pack_padded_sequence(x, [3, 2]))[0].data.sin().sum()  # noqa: E731
    assert torch.autograd.gradgradcheck(run, (x,), atol=1e-4)


def test_convert():
    model = nn.ModuleDict(
        {"a": nn.LSTM(D, H, 2), "b": nn.Sequential(rnn.GRU(H, H)), "c": nn.Linear(H, 2)}
    )
    model["twice"] = model["a"]
    calls = []
    model["a"].register_forward_hook(lambda *_: calls.append("hook"))
    saved, x = model.state_dict(), torch.randn(T, B, D)
    expected = model["b"](model["a"](x)[0])
    calls.clear()
    got = convert(model)
    assert got is model and type(model["a"]) is ours_nn.LSTM and model["twice"] is model["a"]
    assert_same(model["b"](model["a"](x)[0]), expected, 1e-6)
    assert calls == ["hook"]
    assert model.state_dict().keys() == saved.keys()
    alone = nn.RNN(D, H)
    assert type(convert(alone)) is ours_nn.RNN and convert(model["c"]) is model["c"]


CELLS = {"LSTM": nn.LSTMCell, "GRU": nn.GRUCell, "RNN": nn.RNNCell}


def cell_of(layer, kind, suffix="_l0"):
    cell = CELLS[kind](D, H)
    saved = layer.state_dict()
    cell.load_state_dict({name: saved[name + suffix] for name in cell.state_dict()})
    return cell


def as_layers(state):
    return pytree.tree_map(lambda leaf: leaf[None], state)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["whole", "ragged"])
@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_is_torchs_layer(kind, lengths):
    layer = getattr(rnn, kind)(D, H, bidirectional=True)
    forward = Recurrent(cell_of(layer, kind))
    both = Bidirectional(forward, Recurrent(cell_of(layer, kind, "_l0_reverse"), reverse=True))
    x = torch.randn(T, B, D)
    if lengths is None:
        expected, state = layer(x)
        packed = None
    else:
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        out, state = layer(packed)
        expected = pad_packed_sequence(out)[0]
    ys, (last, last_back) = both(x, lengths=lengths)
    joined = pytree.tree_map(lambda a, b: torch.stack([a, b]), last, last_back)
    assert_same((ys, joined), (expected, state), 1e-6)
    if packed is not None:
        got, (last, last_back) = both(packed)
        joined = pytree.tree_map(lambda a, b: torch.stack([a, b]), last, last_back)
        assert_same((got.data, joined), (out.data, state), 1e-6)
    mask = torch.ones(T, B, dtype=torch.bool)
    if lengths is not None:
        mask = torch.arange(T)[:, None] < torch.tensor(lengths)
    assert_same(both(x, mask=mask)[0], ys)


@pytest.mark.parametrize("batch_first", [False, True])
def test_a_cell_of_ones_own(batch_first):
    """Trees go in and come out; a mask with holes; each sequence alone is the oracle."""

    def cell(x, state):
        total = state["total"] + x["a"] * state["rate"]
        return {"y": total.sin(), "n": x["n"]}, {"total": total, "rate": state["rate"] * 0.9}

    inputs = {"a": torch.randn(T, B, D), "n": torch.randint(9, (T, B))}
    state = {"total": torch.randn(B, D), "rate": torch.rand(B, 1)}
    mask = torch.rand(T, B) < 0.6
    turned = (lambda leaf: leaf.transpose(0, 1)) if batch_first else (lambda leaf: leaf)
    layer = Recurrent(cell, batch_first=batch_first)
    ys, last = layer(pytree.tree_map(turned, inputs), state, mask=turned(mask))
    ys = pytree.tree_map(turned, ys)
    for b in range(B):
        own = pytree.tree_map(lambda leaf, b=b: leaf[b], state)
        for t in range(T):
            y = {"y": torch.zeros(D), "n": torch.zeros((), dtype=torch.int64)}
            if mask[t, b]:
                y, own = cell(pytree.tree_map(lambda leaf, t=t, b=b: leaf[t, b], inputs), own)
            assert_same(pytree.tree_map(lambda leaf, t=t, b=b: leaf[t, b], ys), y, 1e-6)
        assert_same(pytree.tree_map(lambda leaf, b=b: leaf[b], last), own, 1e-6)


def test_a_stack_is_torchs_layers():
    layer = rnn.GRU(D, D, num_layers=2, dropout=0.3)
    cells = [nn.GRUCell(D, D), nn.GRUCell(D, D)]
    for k, cell in enumerate(cells):
        cell.load_state_dict({n: layer.state_dict()[f"{n}_l{k}"] for n in cell.state_dict()})
    stack = Stack([Recurrent(cell) for cell in cells], dropout=0.3)
    x, h = torch.randn(T, B, D), torch.randn(2, B, D)
    torch.manual_seed(0)
    expected = layer(x, h)
    torch.manual_seed(0)
    ys, last = stack(x, list(h))
    assert_same((ys, torch.stack(last)), expected, 1e-6)
    packed = pack_padded_sequence(x, LENGTHS, enforce_sorted=False)
    got, _ = stack.eval()(packed)
    assert_same(got.data, layer.eval()(packed)[0].data, 1e-6)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_zoneout(compiled):
    cell = lambda x, h: h + 1  # noqa: E731
    layer = Recurrent(cell, zoneout=0.25)
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    x, h = torch.zeros(40, 50, 1), torch.zeros(50, 20)
    ys, _ = run(x, h)
    steps = torch.cat([h[None], ys]).diff(dim=0)[:-1]
    # the y of a step is the cell's; the state is that, or what it was
    kept = (steps == 0).float().mean()
    assert {0.0, 1.0} == {*steps.unique().tolist()} and 0.22 < kept < 0.28
    layer.eval()
    assert_same(layer(x, h)[1], torch.full((50, 20), 40 * 0.75), 1e-5)


def test_recurrent_dropout_is_one_mask_for_a_sequence():
    layer = Recurrent(lambda x, state: (state[0], (x, state[1] + state[0])), recurrent_dropout=0.5)
    x = torch.ones(T, B, 200)
    ys, _ = layer(x, (torch.ones(B, 200), torch.zeros(B, 200)))
    assert {0.0, 2.0} == {*ys.unique().tolist()} and bool((ys == ys[0]).all())
    layer.eval()
    assert bool((layer(x, (torch.ones(B, 200), torch.zeros(B, 200)))[0] == 1).all())


def test_layer_norm():
    cell = LayerNormLSTMCell(D, H).double()
    layer = Recurrent(cell)
    x = torch.randn(T, B, D, dtype=torch.float64)
    expected, state = [], cell.initial_state(x[0])
    for t in range(T):
        h, c = state
        gates = nn.functional.layer_norm(x[t] @ cell.of_x.weight.t(), (4 * H,))
        gates = gates + nn.functional.layer_norm(h @ cell.of_h.weight.t(), (4 * H,))
        i, f, g, o = gates.chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        state = o.sigmoid() * nn.functional.layer_norm(c, (H,)).tanh(), c
        expected.append(state[0])
    assert_same(layer(x), (torch.stack(expected), state), 1e-9)


def test_what_recurrent_refuses():
    layer, x = Recurrent(nn.GRUCell(D, H)), torch.randn(T, B, D)
    mask = torch.ones(T, B, dtype=torch.bool)
    with pytest.raises(TypeError, match="lengths or mask, not both"):
        layer(x, lengths=LENGTHS, mask=mask)
    with pytest.raises(ValueError, match=r"mask is bool\[4, 6\]"):
        layer(x, mask=mask.t())
    with pytest.raises(TypeError, match="lengths of its own"):
        layer(pack_padded_sequence(x, [T] * B), mask=mask)
    with pytest.raises(TypeError, match="has no hidden_size"):
        Recurrent(lambda x, h: h)(x)
    with pytest.raises(TypeError, match="the state is float32"):
        Recurrent(lambda x, h: (h, h, h))(x, torch.zeros(B, H))
    with pytest.raises(TypeError, match="cell must be callable"):
        Recurrent(None)
    with pytest.raises(ValueError, match="zoneout must be a number in the range"):
        Recurrent(nn.GRUCell(D, H), zoneout=1.5)
    with pytest.raises(ValueError, match="reverse=True"):
        Bidirectional(layer, layer)


@pytest.mark.parametrize("how", [{"checkpoint": "full"}, {"compile": False}], ids=str)
def test_options_reach_the_scan(how, monkeypatch):
    seen = []

    def spy(*args, **kwargs):
        seen.append(kwargs)
        return scan(*args, **kwargs)

    monkeypatch.setattr("torch_scan_hop.nn.over_time.scan", spy)
    x = torch.randn(T, B, D)
    Recurrent(nn.GRUCell(D, H), **how)(x)
    layer = ours_nn.GRU(D, H)
    layer.options = how
    layer(x)
    assert all(how.items() <= given.items() for given in seen) and len(seen) == 2
