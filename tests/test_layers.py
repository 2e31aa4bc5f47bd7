"""``scan_layers`` is ``nn.Sequential``, on every device."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
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


def in_sequence(layers, x):
    for layer in layers:
        x = layer(x)
    return x


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


@pytest.mark.xla
@pytest.mark.skipif(not HAS_XLA, reason="torch_xla")
def test_dropout_differs_from_layer_to_layer():
    layers = nn.ModuleList(nn.Dropout(0.5) for _ in range(4)).to("xla")
    kept = [
        (scan_layers(layers[:n], torch.ones(4096, device="xla")) != 0).float().mean().item()
        for n in (1, 2)
    ]
    assert abs(kept[0] - 0.5) < 0.05 and abs(kept[1] - 0.25) < 0.05
