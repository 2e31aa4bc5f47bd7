"""torch_xla's test_scan.py and test_scan_layers.py as behaviours of ours.

Each row names the test that it corresponds to. On the CPU here, and on XLA's where torch_xla is
installed. What is left out: ``value_and_grad_partitioned`` and ``tree_flatten_none``, which are
torch_xla's own parts (ours are tested in test_autograd and test_api).
"""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from torch import nn

from torch_scan_hop import scan, scan_layers
from torch_scan_hop.reference import scan_loop

HAS_XLA = importlib.util.find_spec("torch_xla") is not None
if HAS_XLA:
    # before autograd's engine starts: it counts devices once, and torch_xla has none until used
    import torch_xla

    torch.zeros(1, device="xla")

DEVICES = [
    "cpu",
    pytest.param(
        "xla",
        marks=[
            pytest.mark.xla,
            pytest.mark.slow,  # XLA compiles a program for each comparison
            pytest.mark.skipif(not HAS_XLA, reason="no XLA"),
        ],
    ),
]


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "xla":
        return torch_xla.device()
    return torch.device(request.param)


def leaf(values, device, requires_grad=True):
    return torch.tensor(values, device=device).requires_grad_(requires_grad)


def total(value):
    leaves = [v for v in torch.utils._pytree.tree_leaves(value) if v is not None]
    return sum(v.sum() for v in leaves)


def check(fn, init, xs):
    """Values and gradients are those of the loop."""
    trip_count = torch.utils._pytree.tree_leaves(xs)[0].shape[0]
    inputs = [v for v in torch.utils._pytree.tree_leaves((init, xs)) if v.requires_grad]
    got, want = scan(fn, init, xs), scan_loop(fn, init, xs, trip_count, False)
    grads = [torch.autograd.grad(total(r), inputs, allow_unused=True) for r in (got, want)]
    compare(got, want)
    compare(*grads)
    return got


def compare(got, want):
    to_cpu = lambda t: t.detach().cpu() if isinstance(t, torch.Tensor) else t  # noqa: E731
    got, want = (torch.utils._pytree.tree_map(to_cpu, tree) for tree in (got, want))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


XS = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


def two_sums(carry, x):
    """A tuple through and through: the two sums, and ys that read them."""
    sums = tuple(c + part.sum() for c, part in zip(carry, x, strict=True))
    return sums, tuple(2 * part + s.sum() for part, s in zip(x, sums, strict=True))


def writes_to_its_own(carry, x):
    carry, y = carry.clone(), x.clone()
    carry.add_(x)
    y.mul_(2)
    return carry, y


BODIES = {
    "test_scan_simple": lambda c, x: (c + x, c + x),
    "test_scan_create_tensors": lambda c, x: (
        c + torch.tensor([1.0, 2.0], device=c.device),
        x + torch.ones(2, device=c.device),
    ),
    "test_scan_internal_in_place_mutation": writes_to_its_own,
    "test_scan_output_none": lambda c, x: (torch.cos(c) + x, None),
    "test_scan_output_unit": lambda c, x: (torch.cos(c) + x, ()),
}


@pytest.mark.parametrize("row", BODIES)
def test_bodies(row, device):
    _, ys = check(BODIES[row], leaf([0.5, 0.25], device), leaf(XS, device))
    if row == "test_scan_output_none":
        assert ys is None
    if row == "test_scan_output_unit":
        assert ys == ()


def test_scan_tuples(device):
    init = leaf([0.0], device), leaf([1.0, 2.0], device)
    check(two_sums, init, (leaf(XS, device), leaf([[1.0] * 3] * 3, device)))


@pytest.mark.parametrize("of_init", [True, False])
@pytest.mark.parametrize("of_xs", [True, False])
def test_scan_gradness(of_init, of_xs, device):
    if of_init or of_xs:
        init, xs = leaf([1.0, 1.0], device, of_init), leaf(XS, device, of_xs)
        check(lambda c, x: (c * x, c * x + x), init, xs)
    else:
        h, _ = scan(
            lambda c, x: (c * x, c), leaf([1.0, 1.0], device, False), leaf(XS, device, False)
        )
        assert not h.requires_grad


def test_scan_external_in_place_mutation(device):
    """torch_xla refuses a body that changes what it closes over; here it means what the loop means."""
    counter = torch.zeros(2, device=device)

    def fn(carry, x):
        counter.add_(1.0)
        return carry + x, carry + counter

    _, ys = scan(fn, torch.zeros(2, device=device), torch.zeros(3, 2, device=device))
    compare((ys, counter), (torch.tensor([[1.0, 1], [2, 2], [3, 3]]), torch.full((2,), 3.0)))


def test_scan_rand_in_fn(device):
    """Each step draws anew."""
    xs = torch.zeros(3, 2, device=device)
    _, ys = scan(lambda c, x: (c + x, torch.rand(2, device=device)), xs[0], xs)
    assert len(set(ys.cpu().flatten().tolist())) == 6


def test_scan_with_rematerialization(device):
    """``checkpoint="full"`` for torch_xla's partition function: the same numbers."""

    def fn(carry, x):
        for _ in range(4):
            carry, x = torch.sin(carry), torch.sin(x)
        return carry, x

    init, xs = leaf([0.1, 0.2], device), leaf(XS, device)
    results = [scan(fn, init, xs, checkpoint=policy) for policy in (None, "full")]
    compare(*results)
    compare(*(torch.autograd.grad(total(r), (init, xs)) for r in results))


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: scan(1000, torch.ones(2), torch.ones(3, 2)), TypeError),
        (
            lambda: scan(lambda a, b: (a, b), torch.ones(2), (torch.ones(3, 2), torch.ones(2, 2))),
            ValueError,
        ),
    ],
    ids=["test_scan_fn_not_callable", "test_scan_incompatible_length"],
)
def test_errors(call, kind):
    with pytest.raises(kind, match=r"^scan: "):
        call()


# --- scan_layers ---


class Triple(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.w = nn.Parameter(torch.randn(6, 6) / 3)

    def forward(self, parts):
        x, y, z = parts
        return self.linear(x).sin(), self.linear(y).cos(), self.linear(z) @ self.w


class Block(nn.Module):
    """A decoder's block in small: attention behind a norm, and a gated feed-forward."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.gate, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        x = x + self.out(torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1) @ v)
        y = self.norms[1](x)
        return x + self.down(torch.relu(self.gate(y)) * self.up(y))


STACKS = {
    "test_linear_layers": (lambda: nn.Linear(6, 6), lambda: torch.randn(6)),
    "test_tuple_layers": (Triple, lambda: tuple(torch.randn(3, 6).unbind(0))),
    "test_decoder_model": (Block, lambda: torch.randn(2, 5, 8)),
}


@pytest.mark.parametrize("row", STACKS)
def test_layers_and_the_gradients_of_their_parameters(row, device):
    make, make_x = STACKS[row]
    layers = [make().to(device) for _ in range(4)]
    x = torch.utils._pytree.tree_map(lambda t: t.to(device), make_x())
    one_by_one = copy.deepcopy(layers)
    want = x
    for layer in one_by_one:
        want = layer(want)
    got = scan_layers(layers, x)
    total(got).backward()
    total(want).backward()
    compare(got, want)
    for layer, other in zip(layers, one_by_one, strict=True):
        compare([p.grad for p in layer.parameters()], [p.grad for p in other.parameters()])


def test_empty_layers(device):
    x = torch.randn(6, device=device)
    compare(scan_layers([], x), x)


@pytest.mark.parametrize(
    "layers",
    [[nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))], [nn.Linear(4, 4), nn.Linear(4, 5)]],
    ids=["test_heterogenous_layers", "test_mismatched_shapes"],
)
def test_layers_that_differ(layers):
    with pytest.raises(ValueError, match=r"^scan_layers: "):
        scan_layers(layers, torch.zeros(4))
