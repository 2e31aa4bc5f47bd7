"""A scan of no steps changes nothing, as a loop over nothing does."""

from __future__ import annotations

import collections
import dataclasses
import random
import types

import numpy as np
import pytest
import torch
from torch import nn

from torch_scan_hop import fallback, scan

pytestmark = pytest.mark.torch_version


class Thing:
    kept = 0

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("h", "new")

    def __init__(self):
        self.h = 0


@dataclasses.dataclass
class Settings:
    seen: int = 0
    items: list[int] = dataclasses.field(default_factory=list)


imported = types.ModuleType("imported")
exec("COUNT = 0\ndef count():\n global COUNT\n COUNT += 1\n return COUNT", vars(imported))
imported.__dict__["itself"] = imported

SEEN: list[int] = []
COUNTED = 0


def counts_globally():
    global COUNTED
    COUNTED += 1
    SEEN.append(1)


def nonlocal_count():
    n = 0

    def count():
        nonlocal n
        n += 1
        return n

    return count, lambda: n


class Model(nn.Module):
    """Changes whatever a step can, and is no scan: it branches on data."""

    def __init__(self):
        super().__init__()
        self.l, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("b", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(3))
        self.h, self.n, self.d, self.hist = None, 0, {"a": 0}, []
        self.q, self.seen = collections.deque([1, 2], maxlen=2), {1}
        self.ordered = collections.OrderedDict(a=1, b=2)
        self.settings, self.slots, self.array = Settings(), Slotted(), np.zeros(2)
        self.count, self.counted = nonlocal_count()
        self.generator, self.drawn = torch.Generator(), None
        self.calls = []
        self.norm.register_forward_hook(lambda *_: self.calls.append(1))

    def forward(self, c, x):
        if c.sum().item() > 1e9:
            return c, c
        self.n, self.h, self.d["k"], self.new = self.n + 1, c, x, 1
        self.hist.append(c), self.q.append(3), self.seen.add(5), self.ordered.popitem(last=False)
        self.settings.seen += 1
        self.settings.items.append(1)
        self.slots.h, self.slots.new = 1, 2
        self.array += 1
        self.count(), counts_globally()
        Thing.kept += 1
        self._write(c, x)
        self.drawn = torch.rand(1, generator=self.generator)
        c = torch.tanh(self.l(c) + x) + torch.rand(3) * random.random() * np.random.rand()
        return c, c

    def _write(self, c, x):
        self.norm(torch.stack([c, c + 1]))
        self.b.add_(x.sum() + 1)
        self.replaced = self.replaced + 1
        self.l.weight.data = self.l.weight.data * 2
        self.l.bias.data.mul_(2)
        self.l.weight.grad = torch.ones(3, 3)
        self.l.bias.register_hook(lambda g: g * 0)
        self.l.bias.requires_grad_(False)
        self.l.train(False)

    def state(self):
        """What a program sees of it, as text."""
        own = dict(vars(self), weights=[*self.state_dict().items()])
        slots = {name: getattr(self.slots, name, None) for name in Slotted.__slots__}
        tensors = [*self.parameters(), *self.buffers()]
        of_tensors = [(id(v), v._version, v.requires_grad, v.grad) for v in tensors]
        drawn = (torch.rand(2), random.random(), np.random.rand(), self.counted())
        drawn = (*drawn, self.generator.get_state().sum())
        return repr((own, slots, of_tensors, drawn, SEEN, COUNTED, Thing.kept, self.l.training))


def seeded_state(model):
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    return model.state()


@pytest.mark.filterwarnings("ignore:torch_scan_hop")
def test_a_loop_of_no_steps_changes_nothing():
    model, other = Model(), torch.zeros(2)
    at_first = [other]

    def cell(c, x):
        at_first[0] = other.add_(1)
        at_first.append(c)
        return model(c, x)

    before = seeded_state(model)
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    with fallback("allow"):
        carry, ys = scan(cell, torch.zeros(3), torch.zeros(0, 3))
    assert model.state() == before
    assert at_first == [other] and other.tolist() == [0, 0]
    assert carry.tolist() == [0, 0, 0] and ys.shape == (0, 3)
    loss = model.l(torch.ones(3)).sum()
    loss.backward()
    assert model.l.bias.grad.tolist() == [1, 1, 1]  # no hook is left


@pytest.mark.filterwarnings("ignore:torch_scan_hop")
def test_what_autograd_has_saved_before_is_as_it_was():
    buffer, w = torch.ones(3), torch.ones(3, requires_grad=True)

    def cell(c, x):
        buffer.mul_(2)
        return (c + 1 if c.sum().item() > 0 else c), buffer * c

    y = buffer * w
    with fallback("allow"):
        scan(cell, torch.zeros(3), torch.zeros(0, 3))
    y.sum().backward()
    assert w.grad.tolist() == [1, 1, 1]


def writes_x(module, w):
    def cell(c, x):
        module.b.copy_(x)
        return c + w * x, c

    return cell


def averages(module, w):
    def cell(c, x):
        module.b.mul_(0.9).add_(x * w)
        module.d["mean"] = module.b
        return c + module.b, c

    return cell


def normalizes(module, w):
    def cell(c, x):
        y = module.norm(torch.stack([c, c + x]))
        return c * w + y[0], y

    return cell


@pytest.mark.parametrize("make", [writes_x, averages, normalizes])
@pytest.mark.parametrize("mode", ["eager", "compiled", "aot_eager"])
def test_a_captured_scan_of_no_steps_changes_nothing(make, mode):
    module, w = Model(), torch.ones(3, requires_grad=True)
    cell, xs = make(module, w), torch.zeros(0, 3, requires_grad=True)

    def run(init):
        return scan(cell, init, xs, compile=mode == "compiled")

    if mode == "aot_eager":
        run = torch.compile(run, backend=mode, fullgraph=True)
    buffers = [*module.buffers()]
    versions = [v._version for v in buffers]
    with fallback("error"):
        carry, _ = run(torch.ones(3))
    assert all(
        a is b and not a.requires_grad for a, b in zip(module.buffers(), buffers, strict=True)
    )
    assert [v._version for v in buffers] == versions and module.d == {"a": 0}
    assert not carry.requires_grad and carry.tolist() == [1, 1, 1]


def reads_a_constant_array():
    array = np.broadcast_to(np.ones(3, np.float32), (2, 3))
    return lambda: torch.tensor(array[0]), array.tolist


def draws_with_numpys_generator():
    generator = np.random.default_rng(0)
    return generator.random, lambda: generator.bit_generator.state


def draws_with_numpys_older_generator():
    generator = np.random.RandomState(0)
    return generator.rand, lambda: repr(generator.get_state())


def draws_with_pythons_generator():
    generator = random.Random(0)
    return generator.random, generator.getstate


def draws_with_the_systems_generator():
    return random.SystemRandom().random, lambda: None


def changes_a_number_of_a_file():
    def change():
        imported.COUNT += 1
        return imported.count()

    return change, lambda: (imported.COUNT, imported.itself)


@pytest.mark.filterwarnings("ignore:torch_scan_hop")
@pytest.mark.parametrize(
    "make",
    [
        reads_a_constant_array,
        draws_with_numpys_generator,
        draws_with_numpys_older_generator,
        draws_with_pythons_generator,
        draws_with_the_systems_generator,
        changes_a_number_of_a_file,
    ],
)
def test_what_a_step_is_given_is_as_before(make):
    change, state = make()

    def cell(c, x):
        return (c + change() if c.sum().item() == 0 else c), x

    before = state()
    with fallback("allow"):
        scan(cell, torch.zeros(3), torch.zeros(0, 3))
    assert state() == before


@pytest.mark.filterwarnings("ignore:torch_scan_hop")
def test_a_step_may_ask_for_gradients():
    layer = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer, buffer = torch.optim.Adam(layer.parameters()), torch.ones(3)

    def cell(c, x):
        optimizer.zero_grad()
        buffer.mul_(layer[0].bias)
        loss = (layer(x.expand(2, 3)) * buffer * c).sum()
        loss.backward()
        optimizer.step()
        (g,) = torch.autograd.grad((c * c).sum(), c)
        return c - g, loss.item()

    init = torch.ones(3, requires_grad=True)
    before = repr(layer.state_dict())
    with fallback("allow"):
        carry, ys = scan(cell, init, torch.zeros(0, 3))
    assert carry.requires_grad and carry.tolist() == [1, 1, 1] and ys.shape == (0,)
    assert repr(layer.state_dict()) == before and not optimizer.state and init.grad is None
    assert buffer.tolist() == [1, 1, 1] and not buffer.requires_grad
    assert all(v.grad is None for v in layer.parameters())
