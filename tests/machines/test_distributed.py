"""A scan in a module that DistributedDataParallel or FSDP2 wraps: two processes, on loopback."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from torch_scan_hop import scan

pytestmark = [
    pytest.mark.slow,
    pytest.mark.torch_version,
    pytest.mark.works("DDP", "FSDP2"),
    pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed"),
]
PROCESSES, BATCH = 2, 2


class RNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.u = nn.Linear(3, 4), nn.Linear(4, 4, bias=False)

    def forward(self, xs):
        def cell(h, x):
            h = torch.tanh(self.w(x) + self.u(h))
            return h, h

        return scan(cell, torch.zeros(xs.shape[1], 4), xs)[1]


def wrapped(model, wrapper):
    if wrapper == "DDP":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (PROCESSES,)))


def gradients_agree(rank, port, wrapper, compiled):
    """In one of the processes: those of its share of the batch, and of all of it in one."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=PROCESSES)
    try:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model, alone = RNN(), RNN()
        alone.load_state_dict(model.state_dict())
        xs = torch.randn(5, PROCESSES * BATCH, 3)
        run = wrapped(model, wrapper)
        run = torch.compile(run) if compiled else run
        run(xs[:, rank * BATCH : (rank + 1) * BATCH]).square().mean().backward()
        alone(xs).square().mean().backward()
        for got, want in zip(model.parameters(), alone.parameters(), strict=True):
            gradient = got.grad.full_tensor() if wrapper == "FSDP2" else got.grad
            torch.testing.assert_close(gradient, want.grad)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_gradients(wrapper, compiled):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(gradients_agree, (port, wrapper, compiled), nprocs=PROCESSES)
