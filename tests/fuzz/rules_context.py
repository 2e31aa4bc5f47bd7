"""What a step computes differently in another context: default dtype, autocast, switches."""

from __future__ import annotations

import random

from .builder import Builder, rule

HELPERS = """\
import contextlib

@contextlib.contextmanager
def setting(write, before, value):
    write(value)
    try:
        yield
    finally:
        write(before)

def default_dtype(value):
    return setting(torch.set_default_dtype, torch.get_default_dtype(), value)

def autocast(device, value=True):
    write = lambda flag: torch.set_autocast_enabled(device, flag)
    return setting(write, torch.is_autocast_enabled(device), value)

def deterministic(value=True):
    write = torch.use_deterministic_algorithms
    return setting(write, torch.are_deterministic_algorithms_enabled(), value)

"""

#: what a second call may find changed, and how a step can tell
DEVICES = ["cpu", "xpu", "mps"]
CONTEXTS = [
    *(f'autocast("{device}")' for device in DEVICES),
    "default_dtype(torch.float64)",
    "default_dtype(torch.float64)",
    "default_dtype(torch.bfloat16)",
    "deterministic()",
]


def choose_context(rng: random.Random) -> str:
    return rng.choice(CONTEXTS)


@rule("contexts")
def asked(g: Builder) -> None:
    """A step that asks what the context is, as torch's own layers do for autocast."""
    a = g.float()
    questions = [
        *(f'torch.is_autocast_enabled("{device}")' for device in DEVICES),
        "torch.get_default_dtype() == torch.float64",
        "torch.are_deterministic_algorithms_enabled()",
    ]
    g.let(f"torch.tanh({a.name} * (0.3 if {g.choose(questions)} else 0.9))", a.type.shape)


@rule("contexts")
def made_without_a_dtype(g: Builder) -> None:
    """A tensor in the default dtype: the digits of its numbers tell which that was."""
    a = g.float(1, 3)
    n = a.type.shape[-1]
    texts = [
        "{a} + torch.full(({n},), 0.1)",
        "{a} * torch.linspace(0.1, 0.7, {n})",
        "{a} + torch.tensor(0.3)",
    ]
    g.let(g.choose(texts).format(a=a.name, n=n), a.type.shape)
