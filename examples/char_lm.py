"""A character-level LSTM language model written with scan, on the text inside CPython.

Trains eagerly and compiled, checks the gradients against the Python loop, exports, saves,
reloads in a fresh process, generates text, and prints what a training step costs each way.

    make demo                    # or: python examples/char_lm.py [--steps N]
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def torchs_own_scan(cell, state, xs):
    from torch._higher_order_ops.scan import scan as torchs

    def without_aliases(state, x):
        (h, c), _ = cell(state, x)
        return (h, c), h.clone()  # it refuses to return h twice

    return torchs(without_aliases, state, xs, dim=0)


# importing ours takes the operator's name: torch's own scan is timed in a process without it
if "torchs-own" in sys.argv:
    scan = torchs_own_scan
else:
    from torch_scan_hop import scan

HIDDEN, BATCH, LENGTH = 128, 16, 64
TIMED_STEPS = 7
TRAINING_SECONDS = 40  # for each of eager and compiled: the demo stays short on a busy machine
PROMPT = "The "


class LSTM(nn.Module):
    """Five lines of cell; ``scan`` is the argument so that other loops can take its place."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(inputs, 4 * hidden) * inputs**-0.5)
        self.u = nn.Parameter(torch.randn(hidden, 4 * hidden) * hidden**-0.5)
        self.b = nn.Parameter(torch.zeros(4 * hidden))

    def cell(self, state: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        h, c = state
        i, f, g, o = (x @ self.w + h @ self.u + self.b).chunk(4, -1)
        c = torch.sigmoid(f + 1) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return (h, c), h

    def forward(self, state, xs, scan_=scan):
        return scan_(self.cell, state, xs)


class LanguageModel(nn.Module):
    def __init__(self, vocabulary: int, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.lstm = LSTM(hidden, hidden)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens, state, scan_=scan):
        """tokens [T, B] -> logits [T, B, V], state"""
        state, hs = self.lstm(state, self.embedding(tokens), scan_)
        return self.head(hs), state


class TorchLanguageModel(nn.Module):
    """The same with nn.LSTM, for the table."""

    def __init__(self, vocabulary: int, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.lstm = nn.LSTM(hidden, hidden)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens, state):
        hs, state = self.lstm(self.embedding(tokens), tuple(s.unsqueeze(0) for s in state))
        return self.head(hs), state


def zero_state(batch: int, hidden: int = HIDDEN) -> tuple[Tensor, Tensor]:
    return torch.zeros(batch, hidden), torch.zeros(batch, hidden)


def python_loop(cell, state, xs):
    hs = []
    for x in xs.unbind(0):
        state, h = cell(state, x)
        hs.append(h)
    return state, torch.stack(hs)


# --- data ---


class Text:
    def __init__(self) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        text = text.encode("ascii", "ignore").decode()
        self.characters = sorted(set(text))
        self.index = {c: k for k, c in enumerate(self.characters)}
        data = self.encode(text)
        split = int(len(data) * 0.95)
        self.train, self.held_out = data[:split], data[split:]

    def encode(self, text: str) -> Tensor:
        return torch.tensor([self.index[c] for c in text])

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.train) - LENGTH - 1, (BATCH,), generator=generator)
        rows = torch.stack([self.train[s : s + LENGTH + 1] for s in starts], 1)
        return rows[:-1], rows[1:]


def loss_of(model, tokens, targets, **options) -> Tensor:
    logits, _ = model(tokens, zero_state(tokens.shape[1]), **options)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def held_out_loss(model, text: Text) -> float:
    """Nats per character on text the model is not trained on."""
    rows = text.held_out[: 64 * 128 + 1]
    tokens, targets = rows[:-1].view(64, 128).t(), rows[1:].view(64, 128).t()
    return loss_of(model, tokens, targets).item()


# --- training ---


def progress(name: str, step: int, steps: int, loss: float, rate: float) -> None:
    width = 30
    done = width * step // steps
    bar = "#" * done + "-" * (width - done)
    line = f"{name:>9} [{bar}] {step:4d}/{steps}  loss {loss:.3f}  {rate:8,.0f} chars/s"
    if sys.stdout.isatty():
        print("\r" + line, end="\n" if step == steps else "", flush=True)
    elif step % max(1, steps // 5) == 0 or step == steps:
        print(line, flush=True)


def train(name: str, model, loss_fn: Callable[..., Tensor], text: Text, steps: int) -> None:
    """``steps`` steps, or as many as TRAINING_SECONDS allow."""
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    generator = torch.Generator().manual_seed(1)
    start, seen, smooth = time.perf_counter(), 0, None
    for step in range(1, steps + 1):
        tokens, targets = text.batch(generator)
        loss = loss_fn(model, tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step == 1:  # the first step captures and compiles
            start = time.perf_counter()
            print(f"{name:>9} first step done", flush=True)
        else:
            seen += tokens.numel()
        value = loss.item()
        smooth = value if smooth is None else 0.9 * smooth + 0.1 * value
        elapsed = time.perf_counter() - start
        progress(name, step, steps, smooth, seen / elapsed)
        if elapsed > TRAINING_SECONDS:
            print(f"{name:>9} stopped after {step} steps, {elapsed:.0f} s", flush=True)
            break


def check_gradients(vocabulary: int) -> float:
    """The largest difference from the Python loop's gradients, in float64."""
    from torch_scan_hop.reference import scan_loop

    torch.manual_seed(3)
    model = LanguageModel(vocabulary, 16).double()
    tokens = torch.randint(vocabulary, (12, 4))
    state = tuple(s.double() for s in zero_state(4, 16))

    def gradients(scan_) -> list[Tensor]:
        logits, _ = model(tokens, state, scan_)
        return list(torch.autograd.grad(logits.logsumexp(-1).sum(), list(model.parameters())))

    ours = gradients(scan)
    reference = gradients(lambda f, s, xs: scan_loop(f, s, xs, xs.shape[0], False))
    return max((a - b).abs().max().item() for a, b in zip(ours, reference, strict=True))


# --- export ---


def export(model, text: Text, path: Path) -> None:
    steps = torch.export.Dim("steps", min=1, max=4096)
    tokens = torch.zeros(5, 1, dtype=torch.int64)
    program = torch.export.export(
        model, (tokens, zero_state(1)), dynamic_shapes=({0: steps}, (None, None)), strict=False
    )
    torch.export.save(program, path)


def generate(path: Path, n: int) -> None:
    """Runs in a process of its own: the file and the text's alphabet are all it has."""
    model, text = torch.export.load(path).module(), Text()
    torch.manual_seed(5)
    tokens, state = text.encode(PROMPT)[:, None], zero_state(1)
    out = PROMPT
    with torch.no_grad():
        for _ in range(n):
            logits, state = model(tokens, state)
            probabilities = torch.softmax(logits[-1, 0] / 0.8, -1)
            tokens = torch.multinomial(probabilities, 1)[None]
            out += text.characters[tokens.item()]
    print(out)


# --- the table ---


def milliseconds(model, loss_fn: Callable[..., Tensor], text: Text) -> tuple[float, float]:
    """(median of a training step, the first one in seconds)"""
    tokens, targets = text.batch(torch.Generator().manual_seed(2))

    def step() -> float:
        start = time.perf_counter()
        model.zero_grad()
        loss_fn(model, tokens, targets).backward()
        return time.perf_counter() - start

    first = step()
    step()
    return 1e3 * statistics.median(step() for _ in range(TIMED_STEPS)), first


def on_xla(text: Text) -> tuple[float, float]:
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    import torch_xla
    import torch_xla.core.xla_model as xm

    device = torch_xla.device()
    model = LanguageModel(len(text.characters)).to(device)
    tokens, targets = (t.to(device) for t in text.batch(torch.Generator().manual_seed(2)))
    state = tuple(s.to(device) for s in zero_state(BATCH))

    def step() -> float:
        start = time.perf_counter()
        model.zero_grad()
        logits, _ = model(tokens, state)
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        torch_xla.sync()
        xm.wait_device_ops()  # sync(wait=True) returns before the device is done
        return time.perf_counter() - start

    first = step()
    step()
    return 1e3 * statistics.median(step() for _ in range(TIMED_STEPS)), first


def in_a_process_of_its_own(which: str) -> tuple[float, float]:
    """torch's own scan, before ours takes its name; XLA, before autograd has counted devices."""
    result = subprocess.run(
        [sys.executable, __file__, "--time", which], capture_output=True, text=True
    )
    if "ModuleNotFoundError" in result.stderr:
        raise ImportError(which)
    result.check_returncode()
    median, first = map(float, result.stdout.split()[-2:])
    return median, first


def table(model, compiled: Callable[..., Tensor], text: Text) -> str:
    torchs = TorchLanguageModel(len(text.characters))
    rows: list[tuple[str, Callable[[], tuple[float, float]]]] = [
        ("scan, eager", lambda: milliseconds(model, loss_of, text)),
        ("scan, torch.compile", lambda: milliseconds(model, compiled, text)),
        (
            "Python loop, eager",
            lambda: milliseconds(model, lambda *a: loss_of(*a, scan_=python_loop), text),
        ),
        ("torch's own scan, eager", lambda: in_a_process_of_its_own("torchs-own")),
        ("nn.LSTM, eager", lambda: milliseconds(torchs, loss_of, text)),
        ("scan, XLA (CPU)", lambda: in_a_process_of_its_own("xla")),
    ]
    lines = [
        f"One training step, LSTM with T={LENGTH} B={BATCH} D=H={HIDDEN}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads",
        "",
        "| | ms per step (median) | first step, s |",
        "|---|---:|---:|",
    ]
    for name, measure in rows:
        try:
            median, first = measure()
            lines.append(f"| {name} | {median:.1f} | {first:.1f} |")
        except ImportError:
            lines.append(f"| {name} | not installed | |")
        except Exception as error:  # another library's scan may refuse; say so and go on
            lines.append(f"| {name} | refuses: {type(error).__name__} | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=250, help="of training, eager and compiled")
    parser.add_argument("--generate", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--time", choices=["torchs-own", "xla"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.generate is not None:
        generate(options.generate, 300)
        return
    torch.manual_seed(0)
    text = Text()
    model = LanguageModel(len(text.characters))
    if options.time is not None:
        print(*(on_xla(text) if options.time == "xla" else milliseconds(model, loss_of, text)))
        return
    vocabulary = len(text.characters)
    print(f"{len(text.train):,} characters of Python's own help, an alphabet of {vocabulary}\n")
    print(f"gradients equal the Python loop's to {check_gradients(vocabulary):.1e} (float64)\n")

    before = held_out_loss(model, text)
    train("eager", model, loss_of, text, options.steps)
    between = held_out_loss(model, text)
    compiled = torch.compile(loss_of, fullgraph=True)
    train("compiled", model, compiled, text, options.steps)
    after = held_out_loss(model, text)
    print(
        f"\nheld-out nats per character: {before:.3f} before (uniform {math.log(vocabulary):.3f}), "
        f"{between:.3f} after eager training, {after:.3f} after compiled training\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "char_lm.pt2"
        export(model, text, path)
        size = path.stat().st_size / 1e6
        print(f"exported, saved ({size:.1f} MB), reloaded in a fresh process:\n")
        subprocess.run(
            [sys.executable, "-W", "ignore", __file__, "--generate", str(path)], check=True
        )
    print("\n" + table(model, compiled, text))


if __name__ == "__main__":
    main()
