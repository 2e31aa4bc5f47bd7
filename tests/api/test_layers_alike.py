"""``scan_layers`` is ``nn.Sequential``, or says which layer is another, and how."""

from __future__ import annotations

import dataclasses
import enum
import functools
import threading

import pytest
import torch
from layer_calls import calls, in_sequence, results
from torch import nn
from torch.nn.utils import parametrizations

from torch_scan_hop import scan_layers


class Mode(enum.Enum):
    ADD = 1
    SUB = 2


@dataclasses.dataclass
class Config:
    scale: float = 1.0
    act: object = torch.tanh


class Plain:
    """No ``__eq__``: compared by its attributes."""

    def __init__(self, scale):
        self.scale = scale


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale


class Loose(nn.Module):
    """A layer with an attribute of any kind, which its forward may use."""

    def __init__(self, value=None, use=None):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self._value, self._use = value, use

    def forward(self, x):
        x = self.linear(x)
        return x if self._use is None else self._use(self._value, x)


def times(scale):
    return lambda x: scale * x


def use_scale(value, x):
    return value.scale * x


def called(value, x):
    return value(x)


EQUAL = {
    "float": (lambda k: 0.1, lambda v, x: v * x),
    "nan": (lambda k: float("nan"), None),
    "closure": (lambda k: times(2.0), called),
    "partial": (lambda k: functools.partial(torch.add, other=2), called),
    "torch function": (lambda k: torch.sin, called),
    "tensor": (lambda k: torch.full((), 0.5), lambda v, x: v * x),
    "nan tensor": (lambda k: torch.tensor([float("nan")]), None),
    "containers": (
        lambda k: {"a": [1, (2.0, torch.ones(1))], "b": {3}},
        lambda v, x: x * v["a"][0],
    ),
    "config": (lambda k: Config(2.0), use_scale),
    "config of tensors": (lambda k: Config(torch.ones(2)), None),
    "object": (lambda k: Plain(2.0), use_scale),
    "slots": (lambda k: Slotted(2.0), use_scale),
    "enum": (lambda k: Mode.ADD, None),
    "dtype": (lambda k: torch.float32, lambda v, x: x.to(v)),
    "device": (lambda k: torch.device("cpu"), None),
}
SHARED = threading.Lock()
DIFFERENT = {
    "float": (lambda k: [0.1, 0.2][k], r"is 0\.2.*is 0\.1"),
    "zero": (lambda k: [0.0, -0.0][k], r"is -0\.0.*is 0\.0"),
    "closure": (lambda k: times(k), r" \(scale\) is 1.*is 0"),
    "lambda": (lambda k: [lambda x: x, lambda x: 2 * x][k], "function"),
    "default": (lambda k: lambda x, s=k: s * x, r"__defaults__\[0\] is 1"),
    "partial": (lambda k: functools.partial(torch.add, other=k), r"keywords\['other'\] is 1"),
    "bound method": (lambda k: Plain(k).__init__, r"__self__\.scale is 1"),
    "tensor": (lambda k: torch.linspace(0, 1, 2)[k], r"with the value 1\.0.*Register it"),
    "dtype of a tensor": (lambda k: torch.ones(1, dtype=[torch.float, torch.int][k]), "int32"),
    "trained tensor": (lambda k: torch.ones(1, requires_grad=True), "Register it"),
    "nested": (lambda k: {"a": [1, (2.0, torch.zeros(1) + k)]}, r"\['a'\]\[1\]\[1\] is"),
    "keys": (lambda k: {k: 1}, r"is \{1: 1\}"),
    "order": (lambda k: dict.fromkeys("ab" if k else "ba"), " is "),
    "set": (lambda k: {k}, r"is \{1\}.*is \{0\}"),
    "config": (lambda k: Config(k), r"\.scale is 1"),
    "object": (lambda k: Plain(k), r"\.scale is 1"),
    "slots": (lambda k: Slotted(k), r"\.scale is 1"),
    "enum": (lambda k: list(Mode)[k], "SUB"),
    "dtype": (lambda k: [torch.float32, torch.float64][k], "is torch.float64"),
    "device": (lambda k: torch.device(["cpu", "meta"][k]), "type='meta'"),
    "type": (lambda k: [1, 1.0][k], r"is 1\.0.*is 1"),
    "lock": (lambda k: threading.Lock(), "cannot be shown to be equal.*one and the same object"),
    "random numbers": (lambda k: torch.Generator(), "cannot be shown"),
}


CALLS = _, compiled = calls("eager")


def check(layers, call=scan_layers, x=None):
    layers = nn.ModuleList(layers)
    x = torch.randn(4, 3) if x is None else x
    torch.testing.assert_close(
        results(call, layers, x), results(in_sequence, layers, x), equal_nan=True
    )


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", EQUAL)
def test_equal_attributes_are_equal(kind, call):
    make, use = EQUAL[kind]
    check([Loose(make(k), use) for k in range(3)], call)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", DIFFERENT)
def test_attributes_that_differ_are_refused_by_name(kind, call):
    make, message = DIFFERENT[kind]
    layers = [Loose(make(0)), Loose(make(1))]
    with pytest.raises(ValueError, match=rf"layers\[1\]\._value.*{message}"):
        call(layers, torch.randn(4, 3))


def test_what_all_layers_share_is_equal():
    layers, x = [Loose(SHARED) for _ in range(3)], torch.randn(4, 3)
    torch.testing.assert_close(scan_layers(layers, x), in_sequence(layers, x))


def test_a_cycle_ends():
    values = [Plain(1.0) for _ in range(3)]
    for value in values:
        value.scale = [value]
    check([Loose(value) for value in values])


def test_a_layer_may_refer_to_itself():
    layers = [Loose(None, called) for _ in range(3)]
    for layer in layers:
        layer._value = layer.linear.forward
    check(layers)
    layers[1]._value = layers[0].linear.forward
    with pytest.raises(ValueError, match=r"layers\[1\]\._value.__self__ is another module"):
        scan_layers(layers, torch.randn(4, 3))


@pytest.mark.parametrize("k", [0, 1])
def test_what_one_layer_alone_has_is_refused(k):
    x = torch.randn(4, 3)
    layers = [nn.Linear(3, 3) for _ in range(2)]
    layers[k].extra = None
    with pytest.raises(ValueError, match=r"layers\[1\]\.extra (exists|is missing)"):
        scan_layers(layers, x)
    layers = [Loose() for _ in range(2)]
    layers[k].drop = nn.Dropout()
    with pytest.raises(ValueError, match=r"layers\[1\]\.drop (exists|is missing)"):
        scan_layers(layers, x)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("k", [0, 1])
def test_a_method_of_one_layer_alone_is_refused(k, call):
    layers = [nn.Linear(3, 3) for _ in range(2)]
    layers[k].forward = lambda x: 2 * x
    with pytest.raises(ValueError, match=r"layers\[1\]\.forward"):
        call(layers, torch.randn(4, 3))


HOOKS = {
    "register_forward_hook": dict(with_kwargs=True, always_call=True),
    "register_forward_pre_hook": dict(with_kwargs=True),
    "register_full_backward_hook": {},
    "register_full_backward_pre_hook": {},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("register", HOOKS)
def test_hooks_are_refused(register, k, call):
    layers = [Loose() for _ in range(3)]
    handle = getattr(layers[k].linear, register)(lambda *_: None, **HOOKS[register])
    with pytest.raises(ValueError, match=rf"layers\[{k}\]\.linear has a .*hook.*around the stack"):
        call(layers, torch.randn(4, 3))
    handle.remove()
    check(layers)


def test_torchs_own_hooks_are_refused():
    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match="lazy modules once"):
        scan_layers([nn.LazyLinear(3) for _ in range(2)], x)
    layers = [nn.LazyLinear(3) for _ in range(2)]
    in_sequence(layers, x)
    check(layers)
    with pytest.warns(FutureWarning):
        layers = [nn.utils.weight_norm(nn.Linear(3, 3)) for _ in range(2)]
    with pytest.raises(ValueError, match=r"torch\.nn\.utils\.parametrizations"):
        scan_layers(layers, x)


@pytest.mark.filterwarnings("ignore:torch_scan_hop")  # spectral_norm assigns to its buffers
@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrized_layers(norm):
    parametrized = getattr(parametrizations, norm)
    check([parametrized(nn.Linear(3, 3)) for _ in range(3)])


def test_parametrizations_that_differ_are_refused():
    x = torch.randn(4, 3)
    one, other = (parametrizations.weight_norm(nn.Linear(3, 3), dim=d) for d in (0, 1))
    with pytest.raises(ValueError, match=r"parametrizations\.weight\.0\.dim is 1.*is 0"):
        scan_layers([one, other], x)
    with pytest.raises(ValueError, match=r"layers\[1\]\.parametrizations is missing"):
        scan_layers([one, nn.Linear(3, 3)], x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(3, 3)

    def forward(self, x):
        return self.rnn(x)[0]


@pytest.mark.filterwarnings("ignore:torch_scan_hop")
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.TransformerEncoderLayer(3, 1, 4, dropout=0.0, activation=nn.GELU()),
        Recurrent,
        lambda: torch.compile(nn.Linear(3, 3), backend="eager"),
    ],
    ids=["transformer", "lstm", "compiled"],
)
def test_common_layers_are_alike(make):
    check([make() for _ in range(3)])


def test_a_compiled_stack_of_torchs_own_layers():
    layers = [nn.TransformerEncoderLayer(3, 1, 4, dropout=0.0) for _ in range(3)]
    check(layers, compiled)
    layers[1].dropout1.p = 0.5
    with pytest.raises(ValueError, match=r"layers\[1\]\.dropout1\.p is 0\.5"):
        compiled(layers, torch.randn(4, 3))


def test_a_compiled_program_sees_that_a_layer_has_changed():
    layers, x = nn.ModuleList(Loose([1.0], None) for _ in range(3)), torch.randn(4, 3)
    torch._dynamo.reset()
    run = torch.compile(lambda x: scan_layers(layers, x), backend="eager", fullgraph=True)
    torch.testing.assert_close(run(x), in_sequence(layers, x))
    layers[2]._value[0] = 2.0
    with pytest.raises(ValueError, match=r"layers\[2\]\._value\[0\] is 2\.0"):
        run(x)
    layers[2]._value[0] = 1.0
    torch.testing.assert_close(run(x), in_sequence(layers, x))
    layers[1].linear.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="hook"):
        run(x)
