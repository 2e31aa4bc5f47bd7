"""Sharded scans on four virtual CPU devices: in a process of their own, SPMD is for good."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.xla
pytest.importorskip("torch_xla")

PROGRAM = """
    import warnings
    import numpy as np
    import torch, torch_xla
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr
    from torch_scan_hop import scan

    warnings.filterwarnings("error", message=".*could not be traced.*")
    xr.use_spmd()
    mesh = xs.Mesh(np.arange(4), (4,), ("data",))
    mesh_text, spec_text = str(mesh), str(("data", None))
    torch.manual_seed(0)
    weights, h0, rows = torch.randn(8, 8) * 0.3, torch.randn(8, 8), torch.randn(5, 8, 8)

    def run(shard_inputs, shard_inside):
        w, h, x = (t.clone().to("xla") for t in (weights, h0, rows))
        w.requires_grad_()
        if shard_inputs:
            xs.mark_sharding(x, mesh, (None, "data", None))
            xs.mark_sharding(h, mesh, ("data", None))
            xs.mark_sharding(w, mesh, (None, "data"))

        def cell(h, x):
            if shard_inside == "input":
                h = torch.ops.xla.aot_mark_sharding(h, mesh_text, spec_text)
            h = torch.tanh(h @ w + x)
            if shard_inside == "value":
                h = torch.ops.xla.aot_mark_sharding(h, mesh_text, spec_text)
            return h, h

        carry, ys = scan(cell, h, x)
        (gradient,) = torch.autograd.grad(ys.square().sum() + carry.sum(), w)
        if shard_inside:
            text = torch_xla._XLAC._get_xla_tensors_hlo([ys, gradient])
            assert text.count('custom_call_target="Sharding"') >= 2, text
        torch_xla.sync()
        return [t.detach().cpu() for t in (carry, ys, gradient)]

    expected = run(False, None)
    for case in [(True, None), (False, "value"), (True, "value"), (False, "input"), (True, "input")]:
        torch.testing.assert_close(run(*case), expected, rtol=1e-5, atol=1e-5)
        print("same", flush=True)
"""


def test_sharded_is_equal_to_unsharded():
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["same"] * 5
