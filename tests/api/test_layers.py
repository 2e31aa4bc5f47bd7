"""``scan_layers`` is ``nn.Sequential``, on every device."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from layer_calls import in_sequence
from torch import nn

import torch_scan_hop
from torch_scan_hop import scan_layers

HAS_XLA = importlib.util.find_spec("torch_xla") is not None
if HAS_XLA:
    import xla_harness  # noqa: F401
DEVICES = [
    "cpu",
    pytest.param(
        "xla", marks=[pytest.mark.xla, pytest.mark.skipif(not HAS_XLA, reason="torch_xla")]
    ),
]


class Block(nn.Module):
    def __init__(self, n: int, p: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(n)
        self.up, self.down = nn.Linear(n, 2 * n), nn.Linear(2 * n, n)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def run(call, layers, x, device):
    layers = copy.deepcopy(layers).to(device)
    x = x.clone().to(device).requires_grad_()
    out = call(layers, x)
    out.square().sum().backward()
    tensors = [out, x.grad, *(p.grad for p in layers.parameters()), *layers.buffers()]
    return [t.detach().cpu() for t in tensors]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(4, 4), lambda: Block(4)], ids=["linear", "block"]
)
@pytest.mark.parametrize("n", [1, 3])
def test_values_and_gradients_of_every_layer(make, n, device):
    layers = nn.ModuleList(make() for _ in range(n)).double()
    x = torch.randn(2, 4, dtype=torch.float64)
    expected = run(in_sequence, layers, x, "cpu")
    actual = run(scan_layers, layers, x, device)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_buffers_change_in_their_own_layer(device):
    layers = nn.ModuleList(nn.BatchNorm1d(3) for _ in range(3))
    x = torch.randn(8, 3)
    reference = copy.deepcopy(layers)
    in_sequence(reference, x)
    layers = layers.to(device)
    scan_layers(layers, x.to(device))
    for mine, theirs in zip(layers, reference, strict=True):
        torch.testing.assert_close(mine.running_mean.cpu(), theirs.running_mean)
        assert mine.num_batches_tracked.item() == 1


def test_no_layers():
    x = torch.ones(2)
    assert scan_layers([], x) is x


def test_pytree_input():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, pair):
            a, b = pair
            return self.linear(b), a + b

    layers, x = [Pair() for _ in range(3)], (torch.randn(3), torch.randn(3))
    torch.testing.assert_close(scan_layers(layers, x), in_sequence(layers, x))


class Exchange(nn.Module):
    """Takes its tuple unpacked, as torch_xla's scan_layers gives it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x, y, z):
        return self.linear(y).sin(), self.linear(z).cos(), x @ self.weight


@pytest.mark.parametrize("device", DEVICES)
def test_a_tuple_is_unpacked_for_layers_of_several_arguments(device):
    layers = nn.ModuleList(Exchange() for _ in range(3)).double()
    x = torch.randn(3, 2, 3, dtype=torch.float64)

    def unpacked(layers, x):
        values = tuple(x)
        for layer in layers:
            values = layer(*values)
        return torch.stack(values)

    expected = run(unpacked, layers, x, "cpu")
    # not leaves: the layers' input is a graph that has not run yet
    actual = run(
        lambda layers, x: torch.stack(scan_layers(layers, tuple(x * 1))), layers, x, device
    )
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_parameters_without_a_gradient_have_none(device):
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)
            self.frozen = nn.Linear(3, 3).requires_grad_(False)

        def forward(self, x):
            return self.frozen(self.used(x))

    layers = nn.ModuleList(Partly() for _ in range(3)).to(device)
    scan_layers(layers, torch.randn(2, 3).to(device)).sum().backward()
    for layer in layers:
        assert layer.used.weight.grad is not None
        assert layer.frozen.weight.grad is None
        assert layer.unused.weight.grad is None


def test_accepts_the_call_of_torch_xla():
    layers, x = [nn.Linear(3, 3) for _ in range(2)], torch.randn(3)
    out = scan_layers(layers, x, partition_fn=None, is_layer_pure=True)
    torch.testing.assert_close(out, in_sequence(layers, x))
    assert torch_scan_hop.scan_layers is scan_layers


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([nn.Linear(3, 3), nn.Linear(3, 3, bias=False)], r"layers\[1\]\.bias is missing"),
        ([nn.Linear(3, 3), nn.Bilinear(3, 3, 3)], r"layers\[1\] is a Bilinear.*is a Linear"),
        ([nn.Linear(3, 3), nn.Linear(3, 4)], r"layers\[1\]\.out_features is 4.*is 3"),
        ([Block(3), Block(3), Block(3, p=0.5)], r"layers\[2\]\.drop\.p is 0\.5.*is 0\.0"),
        ([nn.Linear(3, 3), nn.Linear(3, 3).double()], r"layers\[1\]\.weight is float64"),
        ([Block(3), Block(3).eval()], r"layers\[1\]\.training is False"),
    ],
)
def test_layers_that_differ_are_refused_by_name(layers, message):
    with pytest.raises(ValueError, match=message):
        scan_layers(layers, torch.zeros(3))


@pytest.mark.xla
@pytest.mark.skipif(not HAS_XLA, reason="torch_xla")
def test_one_layer_in_the_hlo():
    from xla_harness import count_of

    def dots(n):
        layers = nn.ModuleList(Block(8) for _ in range(n)).to("xla")
        with torch.no_grad():
            return count_of("dot", scan_layers(layers, torch.randn(2, 8).to("xla")))

    assert dots(2) == dots(12) == 2


class DecoderLayer(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(n), Block(n)
        self.qkv, self.out = nn.Linear(n, 3 * n, bias=False), nn.Linear(n, n, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.mlp(x + self.out(mixed))


class Decoder(nn.Module):
    def __init__(self, n: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.embed, self.unembed = nn.Embedding(11, n), nn.Linear(n, 11)
        self.layers = nn.ModuleList(DecoderLayer(n) for _ in range(depth))

    def forward(self, tokens, through_layers):
        return self.unembed(through_layers(self.layers, self.embed(tokens)))


@pytest.mark.xla
@pytest.mark.skipif(not HAS_XLA, reason="torch_xla")
def test_a_decoder_runs_and_trains_through_a_while():
    import torch_xla
    from xla_harness import count_of

    tokens = torch.randint(0, 11, (2, 6))
    reference = Decoder().double()
    expected = reference(tokens, in_sequence)
    expected.square().sum().backward()

    model = copy.deepcopy(reference).to("xla")
    model.zero_grad()
    logits = model(tokens.to("xla"), scan_layers)
    assert count_of("while", logits) == 1
    logits.square().sum().backward()
    for parameter in model.layers.parameters():
        assert count_of("while", parameter.grad) == 2
    torch_xla.sync()  # all of it as one graph: each .cpu() of a pending tensor compiles its own
    torch.testing.assert_close(logits.detach().cpu(), expected.detach(), rtol=1e-6, atol=1e-6)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.xla
@pytest.mark.skipif(not HAS_XLA, reason="torch_xla")
def test_dropout_differs_from_layer_to_layer():
    layers = nn.ModuleList(nn.Dropout(0.5) for _ in range(4)).to("xla")
    kept = [
        (scan_layers(layers[:n], torch.ones(4096, device="xla")) != 0).float().mean().item()
        for n in (1, 2)
    ]
    assert abs(kept[0] - 0.5) < 0.05 and abs(kept[1] - 0.25) < 0.05
