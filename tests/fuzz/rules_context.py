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

_DIGITS = [
    "{a} + torch.full(({n},), 0.1)",
    "{a} * torch.linspace(0.1, 0.7, {n})",
    "{a} + torch.tensor(0.3)",
]
_ASKS = "{a} * (0.3 if QUESTION else 0.9)"


def _asks(question: str) -> list[str]:
    return [_ASKS.replace("QUESTION", question)]


#: what a second call may find changed, and how a step can tell: it asks, as torch's own layers do
#: for autocast, or makes a tensor, whose digits are of the default dtype
CONTEXTS = {
    **{f'autocast("{d}")': _asks(f'torch.is_autocast_enabled("{d}")') for d in ("cpu", "xpu", "mps")},
    "default_dtype(torch.float64)": [
        *_asks("torch.get_default_dtype() == torch.float64"), *_DIGITS
    ],
    "default_dtype(torch.bfloat16)": [
        *_asks("torch.get_default_dtype() == torch.bfloat16"), *_DIGITS
    ],
    "deterministic()": _asks("torch.are_deterministic_algorithms_enabled()"),
}  # fmt: skip


def choose_context(rng: random.Random) -> str:
    return rng.choice(list(CONTEXTS))


@rule("contexts")
def told_apart(g: Builder) -> None:
    """A step that computes something else in another context, mostly in the one that is to come."""
    a = g.float(1, 3)
    context = g.context if g.chance(0.7) else g.choose(list(CONTEXTS))
    text = g.choose(CONTEXTS[context]).format(a=a.name, n=a.type.shape[-1])
    g.let(f"torch.tanh({text})", a.type.shape)
