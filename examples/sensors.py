"""Gestures from an accelerometer: sequences of many lengths, read in both directions or by spikes.

    python examples/sensors.py       # trains two models, draws sensors.png if matplotlib is there

The data is made here. A recording is noise of 20 to 60 steps with two strokes in it, each of them
slow or fast: its class is which of the four pairs it is. So a model must find the strokes, and
remember the first one when the second one comes.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_scan_hop import scan
from torch_scan_hop.nn import Bidirectional, Recurrent

CHANNELS, HIDDEN, CLASSES, BATCH = 3, 32, 4, 64
#: the accuracy that each model must reach on recordings that it has not seen
GOALS = {"bidirectional": 0.95, "spiking": 0.9}


def recordings(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Padded recordings ``[T, n, CHANNELS]``, their lengths ``[n]`` and classes ``[n]``."""
    lengths, classes = torch.randint(20, 61, (n,)), torch.randint(CLASSES, (n,))
    t = torch.arange(60.0)[:, None]
    signal = torch.zeros(60, n)
    for half, is_fast in enumerate((classes // 2, classes % 2)):
        middle = lengths * (0.3 + 0.4 * half) + torch.rand(n) * 4 - 2
        wave = torch.sin((t - middle) * torch.where(is_fast > 0, 2.2, 0.5))
        signal += wave * torch.exp(-(((t - middle) / 4) ** 2))
    directions = torch.randn(n, CHANNELS)  # a sensor may be held in any way
    xs = signal[..., None] * F.normalize(directions, dim=-1) * 2 + torch.randn(60, n, CHANNELS) / 5
    return xs, lengths, classes


def mean_between(ys: Tensor, first: Tensor | int, end: Tensor) -> Tensor:
    """Over these steps of each recording: ``[T, B, H]`` to ``[B, H]``."""
    t = torch.arange(len(ys))[:, None]
    inside = (first <= t) & (t < end)
    return (ys * inside[..., None]).sum(0) / (end - first)[:, None]


class BothDirections(nn.Module):
    """Any cell is a layer; ``lengths`` keeps the padding out of states and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Bidirectional(
            Recurrent(nn.GRUCell(CHANNELS, HIDDEN)),
            Recurrent(nn.GRUCell(CHANNELS, HIDDEN), reverse=True),
        )
        self.head = nn.Linear(2 * HIDDEN, CLASSES)

    def forward(self, xs: Tensor, lengths: Tensor) -> Tensor:
        ys, _ = self.layer(xs, lengths=lengths)
        return self.head(mean_between(ys, 0, lengths))


class Spike(torch.autograd.Function):
    """A step, whose derivative is taken to be that of a fast sigmoid."""

    @staticmethod
    def forward(ctx, above):
        ctx.save_for_backward(above)
        return (above > 0).to(above.dtype)

    @staticmethod
    def backward(ctx, gradient):
        (above,) = ctx.saved_tensors
        return gradient / (1 + 5 * above.abs()) ** 2


class Neurons(nn.Module):
    """Neurons that keep their state in attributes, as those of spiking libraries do."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.leaks = nn.Parameter(torch.linspace(0.0, 4.0, n))  # memories from short to long

    def reset(self, batch: int) -> None:
        self.potential = self.spikes = torch.zeros(batch, len(self.leaks))

    def forward(self, current: Tensor) -> Tensor:
        kept = torch.sigmoid(self.leaks) * (1 - self.spikes)  # a neuron that fired starts anew
        self.potential = kept * self.potential + current
        self.spikes = Spike.apply(self.potential - 1)
        return self.spikes


class Spiking(nn.Module):
    """Stateful neurons that hear one another. ``scan`` carries what a step assigns to attributes.

    They forget within tens of steps: spikes of both halves of a recording are counted apart.
    """

    def __init__(self) -> None:
        super().__init__()
        n = 4 * HIDDEN
        self.of_x, self.of_spikes = nn.Linear(CHANNELS, n), nn.Linear(n, n, bias=False)
        self.neurons = Neurons(n)
        self.head = nn.Linear(2 * n, CLASSES)

    def step(self, _: None, x: Tensor) -> tuple[None, Tensor]:
        return None, self.neurons(3 * self.of_x(x) + self.of_spikes(self.neurons.spikes))

    def forward(self, xs: Tensor, lengths: Tensor) -> Tensor:
        self.neurons.reset(xs.shape[1])
        _, spikes = scan(self.step, None, xs)
        halves = mean_between(spikes, 0, lengths // 2), mean_between(spikes, lengths // 2, lengths)
        return self.head(torch.cat(halves, -1))


def train(model: nn.Module, steps: int, goal: float) -> list[float]:
    """Until ``goal`` is passed on new recordings, at most ``steps`` steps; the accuracies."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    found: list[float] = []
    for step in range(1, steps + 1):
        xs, lengths, classes = recordings(BATCH)
        optimizer.zero_grad()
        F.cross_entropy(model(xs, lengths), classes).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            found.append(accuracy(model))
            if found[-1] >= goal + 0.03:
                break
    return found


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    xs, lengths, classes = recordings(512)
    return (model(xs, lengths).argmax(-1) == classes).double().mean().item()


def draw(curves: dict[str, list[float]], path: str) -> None:
    try:
        from matplotlib import pyplot
    except ImportError:
        return
    _, axes = pyplot.subplots()
    for name, values in curves.items():
        axes.plot([20 * (k + 1) for k in range(len(values))], values, label=name)
    axes.set(xlabel="step", ylabel="accuracy on new recordings", ylim=(0, 1))
    axes.legend()
    pyplot.savefig(path)
    print(f"drawn: {path}")


def main() -> None:
    torch.set_num_threads(1)  # a step's products are small
    curves = {}
    for name, make in {"bidirectional": BothDirections, "spiking": Spiking}.items():
        torch.manual_seed(0)
        model, start = make(), time.perf_counter()
        curves[name] = train(model, 500, GOALS[name])
        score, seconds = accuracy(model), time.perf_counter() - start
        print(f"{name}: {score:.3f} of new recordings are right, after {seconds:.0f} s")
        assert score >= GOALS[name], f"{name}: expected {GOALS[name]}"
    draw(curves, "sensors.png")


if __name__ == "__main__":
    main()
