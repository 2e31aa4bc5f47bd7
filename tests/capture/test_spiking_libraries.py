"""Neurons of snntorch and spikingjelly, which keep their state in attributes, unchanged."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_same
from oracle import written_loop as loop
from torch import nn

from torch_scan_hop import fallback, scan

pytestmark = pytest.mark.filterwarnings("ignore")


def neurons():
    try:
        import snntorch
    except ImportError:
        snntorch = None
    try:
        from spikingjelly.activation_based import neuron
    except ImportError:
        neuron = None
    found = {}
    if snntorch is not None:
        hidden = {"init_hidden": True}
        found |= {
            "Leaky": lambda: snntorch.Leaky(beta=0.9, **hidden),
            "Leaky with a learnt beta": lambda: snntorch.Leaky(beta=0.9, learn_beta=True, **hidden),
            "Synaptic": lambda: snntorch.Synaptic(alpha=0.9, beta=0.8, **hidden),
            "Lapicque": lambda: snntorch.Lapicque(beta=0.9, **hidden),
            "Alpha": lambda: snntorch.Alpha(alpha=0.9, beta=0.8, **hidden),
            "RLeaky": lambda: snntorch.RLeaky(beta=0.9, V=0.5, all_to_all=False, **hidden),
        }
    if neuron is not None:
        found |= {
            "IF": neuron.IFNode,
            "LIF": neuron.LIFNode,
            "PLIF": neuron.ParametricLIFNode,
        }
    return found


NEURONS = neurons()
if not NEURONS:
    pytest.skip("neither snntorch nor spikingjelly is installed", allow_module_level=True)


def compiled(cell, init, xs):
    return torch.compile(scan, backend="aot_eager", fullgraph=True)(cell, init, xs)


@pytest.mark.parametrize("run", [scan, compiled])
@pytest.mark.parametrize("name", NEURONS)
def test_as_the_loop(name, run):
    def outcome(way):
        torch._dynamo.reset()
        torch.manual_seed(0)
        net, layer = nn.Linear(8, 4), NEURONS[name]()

        def cell(carry, x):
            out = layer(net(x))
            return carry, out[0] if isinstance(out, tuple) else out

        xs = torch.rand(6, 3, 8) * 2
        found = []
        for _ in range(2):  # the second goes on from the state of the first
            with fallback("error"):
                found.append(way(cell, torch.zeros(1), xs)[1])
        return found, torch.autograd.grad(sum(map(torch.sum, found)), net.parameters())

    assert_same(outcome(run), outcome(loop), 1e-5)


@pytest.mark.skipif("Leaky" not in NEURONS, reason="snntorch is not installed")
@pytest.mark.parametrize("run", [scan, compiled])
def test_a_state_that_is_empty_at_first(run):
    import snntorch

    leaky = snntorch.Leaky(beta=0.9)

    def cell(membrane, x):
        spike, membrane = leaky(x, membrane)
        return membrane, spike

    xs = torch.rand(6, 3, 4) * 2
    start = leaky.init_leaky()
    assert_same(run(cell, start, xs), loop(cell, start, xs), 1e-6)
