"""TorchRL's recurrent modules with ``recurrent_backend="scan"`` on our operator, unchanged."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_same

from torch_scan_hop import accelerate_torch
from torch_scan_hop.op import scan_op

modules = pytest.importorskip("torchrl.modules", reason="torchrl is not installed")
tensordict = pytest.importorskip("tensordict")

B, T, D, H = 3, 7, 4, 5


def batch(states):
    torch.manual_seed(0)
    is_init = torch.zeros(B, T, 1, dtype=torch.bool)
    is_init[:, 0] = is_init[1, 3] = True  # an episode that ends within the batch
    return tensordict.TensorDict(
        {
            "x": torch.randn(B, T, D),
            "is_init": is_init,
            **{name: torch.zeros(B, T, 1, H) for name in states},
        },
        [B, T],
    )


def make(kind, backend):
    torch.manual_seed(1)
    cls, states = {
        "gru": (modules.GRUModule, ["h"]),
        "lstm": (modules.LSTMModule, ["h", "c"]),
    }[kind]
    module = cls(
        input_size=D,
        hidden_size=H,
        in_keys=["x", *states],
        out_keys=["y", *(("next", name) for name in states)],
        recurrent_backend=backend,
        default_recurrent_mode=True,
    )
    return module, batch(states)


def values_and_gradients(module, data):
    y = module(data)["y"]
    return y, *torch.autograd.grad(y.square().sum(), list(module.parameters()))


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_a_recurrent_module(kind, monkeypatch):
    expected = values_and_gradients(*make(kind, "pad"))
    ours = []
    call = type(scan_op).__call__
    monkeypatch.setattr(
        type(scan_op), "__call__", lambda *args, **kw: (ours.append(args), call(*args, **kw))[1]
    )
    with accelerate_torch():
        assert_same(values_and_gradients(*make(kind, "scan")), expected, 1e-4)
    assert ours
