"""``nn.LSTM`` on ragged batches, padded and packed, beside ``torch_scan_hop.nn.LSTM``.

python -m benchmarks.ragged [--quick]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import torch_scan_hop.nn as ours_nn
from benchmarks import report
from benchmarks.page import Page
from benchmarks.timing import interleaved

B, SHORTEST, LONGEST = 64, 10, 200
WIDTHS = (64, 128, 256)
PADDED, PACKED = "nn.LSTM, padded", "nn.LSTM, packed"
LENGTHS, OURS_PACKED = "ours, lengths, compiled", "ours, packed"
TOLERANCE = 1e-4

ABOUT = [
    f"B = {B}, lengths {SHORTEST} to {LONGEST}, float32, as many inputs as hidden units. Training:",
    "forward, sum of squares of the valid ys, backward. nn.LSTM in milliseconds (median and",
    "quartiles); ours in parts of the median of the same form. nn.LSTM on a padded batch runs",
    "through the padding and mixes it into the last state; ours does not. Contestants take turns.",
    "",
]

Layer = Callable[[Tensor, Tensor], Tensor]


def contestants(width: int) -> tuple[dict[str, Layer], list[nn.Module]]:
    torchs, ours = nn.LSTM(width, width), ours_nn.LSTM(width, width)
    ours.load_state_dict(torchs.state_dict())
    compiled = torch.compile(lambda x, lengths: ours(x, lengths=lengths)[0])

    def packed(layer: nn.Module) -> Layer:
        def run(x: Tensor, lengths: Tensor) -> Tensor:
            ys, _ = layer(pack_padded_sequence(x, lengths, enforce_sorted=False))
            return pad_packed_sequence(ys)[0]

        return run

    layers: dict[str, Layer] = {
        PADDED: lambda x, lengths: torchs(x)[0],
        PACKED: packed(torchs),
        LENGTHS: compiled,
        OURS_PACKED: packed(ours),
    }
    return layers, [torchs, ours]


def measure(width: int, rounds: int) -> dict[str, list[float]]:
    torch.manual_seed(0)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (B,))
    lengths[0] = LONGEST
    valid = (torch.arange(LONGEST)[:, None] < lengths)[..., None]
    x = torch.randn(LONGEST, B, width).where(valid, torch.zeros(()))
    layers, modules = contestants(width)

    def train(layer: Layer) -> Tensor:
        for module in modules:
            module.zero_grad()
        ys = layer(x, lengths).where(valid, torch.zeros(()))
        ys.square().sum().backward()
        return ys.detach()

    expected = train(layers[PACKED])
    for name, layer in layers.items():
        error = (train(layer) - expected).abs().max().item()
        if not error < TOLERANCE:
            raise SystemExit(f"{name} is off by {error:.1e}")
    calls = {name: lambda layer=layer: train(layer) for name, layer in layers.items()}
    timings = interleaved(calls, rounds).items()
    return {name: [t.median, t.low, t.high] for name, t in timings}


def line(width: int, found: dict[str, list[float]]) -> list[object]:
    def beside(ours: str, torchs: str) -> str:
        median, low, high = (value / found[torchs][0] for value in found[ours])
        return f"{median:.2f} ({low:.2f}-{high:.2f})"

    torchs = [
        f"{m:.1f} ({low:.1f}-{high:.1f})" for m, low, high in map(found.get, (PADDED, PACKED))
    ]
    worst = max(found[LENGTHS][0] / found[PADDED][0], found[OURS_PACKED][0] / found[PACKED][0])
    return [
        width, *torchs, beside(LENGTHS, PADDED), beside(OURS_PACKED, PACKED),
        report.verdict(worst, 1.0),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ragged")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, not written")
    options = parser.parse_args()
    page = Page("Ragged batches beside nn.LSTM", "ragged")
    lines: list[list[Any]] = []
    for width in WIDTHS:
        found = page.measured("measure", width, 5 if options.quick else 15, limit=900)
        lines.append(line(width, found))
        print(*lines[-1], flush=True)
    head = ["H", PADDED + ", ms", PACKED + ", ms", LENGTHS, OURS_PACKED, "<= 1"]
    page.write([*ABOUT, *report.table(head, lines)], not options.quick)


if __name__ == "__main__":
    main()
