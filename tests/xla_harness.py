"""Runs one program with the Python loop on the CPU, and with ``scan`` on XLA."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
import torch_xla

import torch_scan_hop
from torch_scan_hop import tree
from torch_scan_hop.reference import scan_loop

# Before autograd's engine starts: it counts devices once, and torch_xla has none until used.
DEVICE = torch.zeros(1, device="xla").device

#: Metrics of torch_xla that mean that the device worked or was talked to.
DEVICE_METRICS = {
    "ExecuteTime", "ExecuteReplicatedTime", "CompileTime", "InboundData", "OutboundData",
    "TransferFromDeviceTime", "TransferToDeviceTime",
}  # fmt: skip


def loop(combine_fn, init, xs=None, length=None, *, reverse=False, checkpoint=None):
    leaves = tree.tensors(xs)
    trip_count = leaves[0].shape[0] if leaves else length
    return scan_loop(combine_fn, init, xs, trip_count, reverse)


class Program:
    """What a test program is given: a ``scan``, a device, and reproducible tensors on it."""

    def __init__(self, scan: Callable, device: str, seed: int = 0) -> None:
        self.scan = scan
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)
        self.parameters: list[torch.Tensor] = []

    def randn(self, *shape: int, grad: bool = False, dtype: torch.dtype = torch.float64):
        value = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return self.tensor(value.to(dtype), grad)

    def tensor(self, value: Any, grad: bool = False):
        value = torch.as_tensor(value).to(self.device).requires_grad_(grad)
        if grad:
            self.parameters.append(value)
        return value

    def module(self, module: torch.nn.Module) -> torch.nn.Module:
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(torch.randn(p.shape, generator=self.generator, dtype=p.dtype) * 0.3)
        module = module.to(self.device)
        self.parameters += list(module.parameters())
        return module

    def gradients(self, outputs: Any) -> list[torch.Tensor | None]:
        """Of a loss that weighs every element of every output differently."""
        leaves = [o for o in pytree.tree_leaves(outputs) if isinstance(o, torch.Tensor)]
        loss = sum(
            (
                o * torch.linspace(0.5, 1.5, o.numel(), dtype=o.dtype).to(o.device).view(o.shape)
            ).sum()
            for o in leaves
            if o.requires_grad
        )
        return list(torch.autograd.grad(loss, self.parameters, allow_unused=True))


def on_cpu(values: Any) -> list[Any]:
    return [
        v.detach().cpu() if isinstance(v, torch.Tensor) else v for v in pytree.tree_leaves(values)
    ]


def check(program: Callable[[Program], Any], tolerance: float = 1e-10) -> None:
    """Values and gradients agree; a gradient that only one side has is zero."""
    results = []
    for scan, device in ((loop, "cpu"), (torch_scan_hop.scan, "xla")):
        given = Program(scan, device)
        outputs = program(given)
        gradients = given.gradients(outputs) if given.parameters else []
        results.append((on_cpu(outputs), on_cpu(gradients)))
    expected, actual = results
    torch.testing.assert_close(actual[0], expected[0], rtol=tolerance, atol=tolerance)
    for a, e in zip(actual[1], expected[1], strict=True):
        if a is None or e is None:
            # after no steps, some gradients are zeros and some do not exist
            assert all(g is None or not g.any() for g in (a, e)), (a, e)
        else:
            torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)


def hlo_of(*tensors: torch.Tensor) -> str:
    return torch_xla._XLAC._get_xla_tensors_hlo(list(tensors))


def count_of(opcode: str, *tensors: torch.Tensor) -> int:
    """How often ``opcode`` stands in the pending HLO of these tensors."""
    return sum(f" {opcode}(" in line for line in hlo_of(*tensors).splitlines())


def steps_of_loops(*tensors: torch.Tensor) -> list[list[str]]:
    """Of each While in the pending HLO of these tensors: the lines of what it runs at each step.

    That is the scan's body alone: the loop's own slicing of stacks is a computation around it.
    """
    computations: dict[str, list[str]] = {}
    for line in hlo_of(*tensors).splitlines():
        if line.startswith(("%", "ENTRY")):
            name = line.removeprefix("ENTRY ").split(" ")[0]
            computations[name] = []
        elif line.startswith("  "):
            computations[name].append(line)
    lines = [line for body in computations.values() for line in body]
    loops = [re.search(r"body=(%[\w.]+)", line)[1] for line in lines if " while(" in line]
    steps = []
    for loop in loops:
        (call,) = [line for line in computations[loop] if " call(" in line]
        steps.append(computations[re.search(r"to_apply=(%[\w.]+)", call)[1]])
    return steps


class DeviceWork:
    """Records what torch_xla's metrics saw: ``with DeviceWork() as work: ...; work.seen``."""

    def __enter__(self) -> DeviceWork:
        import torch_xla.core.xla_model as xm
        import torch_xla.debug.metrics as metrics

        xm.wait_device_ops()
        metrics.clear_all()
        self.seen: set[str] = set()
        return self

    def __exit__(self, *_: object) -> None:
        import torch_xla.debug.metrics as metrics

        self.seen = DEVICE_METRICS & set(metrics.metric_names())


def n_compiles() -> int:
    import torch_xla.debug.metrics as metrics

    data = metrics.metric_data("CompileTime")
    return 0 if data is None else data[0]
