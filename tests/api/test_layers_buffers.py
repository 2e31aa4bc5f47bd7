"""Buffers and parameters of ``scan_layers``: what a forward changes, and what layers share."""

from __future__ import annotations

import copy

import pytest
import torch
from layer_calls import calls, in_sequence, results
from torch import nn

from torch_scan_hop import scan_layers


@pytest.fixture(autouse=True)
def _float64():
    """Products with a counter grow, and their sums cancel."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def new_counter():
    """Torch 2.9 leaves out what compiled code writes to a float64 tensor of no dimensions."""
    return torch.zeros((), dtype=torch.float32)


class Counts(nn.Module):
    """A step counter in a buffer, and something that depends on it."""

    def __init__(self, counter=None, assigns=False):
        super().__init__()
        self.register_buffer("counter", new_counter() if counter is None else counter)
        self.linear, self.assigns = nn.Linear(3, 3), assigns

    def forward(self, x):
        if self.assigns:
            self.counter = self.counter + 1
        else:
            self.counter += 1
        return self.linear(x) * self.counter.clone()


CALLS = _, compiled = calls("aot_eager")


def check(layers, call=scan_layers):
    layers, x = nn.ModuleList(layers), torch.randn(4, 3)
    torch.testing.assert_close(
        results(call, layers, x, times=2), results(in_sequence, layers, x, times=2)
    )


@pytest.mark.parametrize("call", CALLS)
def test_a_buffer_that_all_layers_share_changes_from_layer_to_layer(call):
    counter = new_counter()
    check([Counts(counter) for _ in range(3)], call)


@pytest.mark.parametrize("call", CALLS)
def test_buffers_of_their_own_change_on_their_own(call):
    check([Counts() for _ in range(3)], call)


def test_a_buffer_that_some_layers_share_is_refused():
    counter = new_counter()
    layers = [Counts(counter), Counts(counter), Counts()]
    with pytest.raises(ValueError, match=r"counter.*layers\[0\] and layers\[1\]"):
        scan_layers(layers, torch.randn(4, 3))
    assert counter == 0


@pytest.mark.filterwarnings("ignore:torch_scan_hop")
def test_a_buffer_that_is_assigned_to():
    check([Counts(assigns=True) for _ in range(3)])


@pytest.mark.filterwarnings("ignore:torch_scan_hop")
def test_an_attribute_that_is_assigned_to():
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.steps = nn.Linear(3, 3), 0

        def forward(self, x):
            self.steps += 1
            return self.linear(x) * self.steps

    layers = [Steps() for _ in range(3)]
    check(layers)
    scan_layers(layers, torch.randn(4, 3))
    assert [layer.steps for layer in layers] == [1, 1, 1]


@pytest.mark.parametrize("call", CALLS)
def test_one_layer_many_times(call):
    check([nn.Linear(3, 3)] * 3, call)


@pytest.mark.parametrize("call", CALLS)
def test_a_parameter_that_all_layers_share(call):
    layers = [nn.Linear(3, 3) for _ in range(3)]
    for layer in layers:
        layer.weight = layers[0].weight
    check(layers, call)


@pytest.mark.filterwarnings("ignore:torch_scan_hop")
def test_a_parameter_that_forward_changes():
    """In eager mode the layers run one by one then, and say so."""

    class Clamps(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    layers, x = nn.ModuleList(Clamps(3, 3) for _ in range(3)), torch.randn(4, 3)
    reference = copy.deepcopy(layers)
    torch.testing.assert_close(scan_layers(layers, x), in_sequence(reference, x))
    torch.testing.assert_close(list(layers.parameters()), list(reference.parameters()))
    with pytest.raises(ValueError, match="changes weight in place"):
        compiled(layers, x)


class Scales(nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.register_buffer("scale", buffer)

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize("call", CALLS)
def test_what_no_layer_changes_is_not_written(call):
    with torch.inference_mode():
        made = torch.full((3,), 2.0)
    x = torch.randn(4, 3)
    for buffers in ([torch.ones(1).expand(3) for _ in range(3)], [made.clone() for _ in "abc"]):
        layers = [Scales(buffer) for buffer in buffers]
        torch.testing.assert_close(call(layers, x), in_sequence(layers, x))


@pytest.mark.parametrize("call", CALLS)
def test_a_backward_after_another_use(call):
    layers, x = nn.ModuleList(nn.BatchNorm1d(3) for _ in range(3)).eval(), torch.randn(4, 3)
    before = in_sequence(layers, x)
    call(layers, x)
    before.sum().backward()


class Model(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(3))

    def forward(self, x):
        return scan_layers(self.layers, x)


@pytest.mark.parametrize(
    ("make", "trains"),
    [
        (lambda: nn.Linear(3, 3), True),
        (lambda: nn.BatchNorm1d(3), True),
        (lambda: nn.BatchNorm1d(3), False),
    ],
    ids=["no buffers", "train", "eval"],
)
def test_an_exported_program_is_saved_and_loaded(make, trains, tmp_path):
    model, x = Model(make).train(trains), torch.randn(4, 3)
    reference = copy.deepcopy(model.layers)
    program = torch.export.export(model, (x,))
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(loaded(x), in_sequence(reference, x))
    expected = dict(reference.named_buffers())
    for name, buffer in loaded.named_buffers():
        torch.testing.assert_close(buffer, expected[name.removeprefix("layers.")])
