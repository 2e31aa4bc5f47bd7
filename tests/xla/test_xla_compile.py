"""Scans in programs that torch compiles for XLA, or exports."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.xla,
    pytest.mark.works("XLA"),
    pytest.mark.filterwarnings("error:.*could not be traced"),
]
torch_xla = pytest.importorskip("torch_xla")

from xla_harness import DeviceWork, n_compiles  # noqa: E402

from torch_scan_hop import scan  # noqa: E402


def forward(w, h, x):
    def cell(h, x):
        h = torch.tanh(h @ w + x)
        return h, h

    carry, ys = scan(cell, h * 2, x)
    return carry + 1, ys


def loss(w, h, x):
    carry, ys = forward(w, h, x)
    return carry.sum() + ys.square().sum()


def inputs():
    w = torch.randn(3, 3).to("xla").requires_grad_()
    return w, torch.randn(2, 3).to("xla"), torch.randn(5, 2, 3).to("xla")


def test_openxla_forward():
    given = inputs()
    compiled = torch.compile(forward, backend="openxla", fullgraph=True)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(*given), forward(*given))


def test_openxla_training():
    given = inputs()
    compiled = torch.compile(loss, backend="openxla", fullgraph=True)
    (expected,) = torch.autograd.grad(loss(*given), given[0])
    for _ in range(3):
        (gradient,) = torch.autograd.grad(compiled(*given), given[0])
        torch.testing.assert_close(gradient, expected)


def test_openxla_runs_one_graph():
    import torch_xla.debug.metrics as metrics

    given = inputs()
    compiled = torch.compile(forward, backend="openxla", fullgraph=True)
    with torch.no_grad():
        compiled(*given)
        torch_xla.sync(wait=True)
        with DeviceWork() as work:
            compiled(*given)
        assert metrics.metric_data("RunCachedGraphInputData")[0] == 1
    assert "CompileTime" not in work.seen


def test_openxla_with_two_scans():
    given = inputs()

    def twice(w, h, x):
        carry, ys = forward(w, h, x)
        return forward(w, carry, ys)

    compiled = torch.compile(twice, backend="openxla", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given), twice(*given))


def test_torch_xla_compile():
    w, h, x = inputs()

    def step():
        return torch.autograd.grad(loss(w, h, x), w)[0]

    torch.testing.assert_close(torch_xla.compile(step)(), step())


def test_torch_xla_compile_trains_with_one_program():
    w, h, x = inputs()
    optimizer = torch.optim.SGD([w], lr=0.01)

    # backward(), not autograd.grad: its thread may hold a gradient that nothing else does for a
    # moment longer, with or without a scan, and the program is then one that returns it as well
    def step():
        optimizer.zero_grad()
        value = loss(w, h, x)
        value.backward()
        optimizer.step()
        return value.detach()

    compiled, losses, compiles = torch_xla.compile(step, full_graph=True), [], []
    for _ in range(4):
        losses.append(compiled().item())
        compiles.append(n_compiles())
    assert losses == sorted(losses, reverse=True) and losses[3] < losses[0]
    assert compiles[1:] == [compiles[0]] * 3


def test_stablehlo_export():
    from torch_xla.stablehlo import exported_program_to_stablehlo

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(3, 3))

        def forward(self, h, x):
            return forward(self.w, h, x)

    model, given = Model(), (torch.randn(2, 3), torch.randn(5, 2, 3))
    program = exported_program_to_stablehlo(torch.export.export(model, given))
    assert program.get_stablehlo_text().count("stablehlo.while") == 1
    expected = model(*given)
    actual = program(*(g.numpy() for g in given))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(a).cpu(), e.detach(), rtol=1e-5, atol=1e-5)
