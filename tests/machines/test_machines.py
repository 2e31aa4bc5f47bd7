"""What people run on more than one machine, with a scan in it; each beside one process.

torch.distributed.pipelining, DDP's ``join``, torch.distributed.checkpoint, parallelize_module,
FSDP2 around weights that are DTensors, and a mesh of two dimensions; on loopback.
"""

from __future__ import annotations

import copy
import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from torch_scan_hop import NotTraceableError, fallback, scan
from torch_scan_hop.nn import GRU, Recurrent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.torch_version,
    pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed"),
]
T, B, D = 4, 4, 8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = GRU(D, D)

    def forward(self, x):
        return self.gru(x)[0]


class Cell(nn.Module):
    """Two products, that tensor parallelism cuts by columns and by rows."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D, bias=False), nn.Linear(2 * D, D, bias=False)

    def forward(self, x, h):
        return torch.tanh(x + self.down(torch.relu(self.up(h))))


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def assert_grads(got, expected):
    for mine, one in zip(got.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), one.grad, rtol=1e-4, atol=1e-5)


def mesh_of(*sizes, names=None):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


# --- two processes ---


def pipeline_of_two_stages(rank, _):
    """Microbatches are cut from the batch, dimension 1. Stages send contiguous tensors only, which
    a layer with ``batch_first`` neither gives nor gets as a gradient."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    from torch.distributed.pipelining.microbatch import TensorChunkSpec

    def loss(ys, target):  # targets are cut along their dimension 0
        return nn.functional.mse_loss(ys.transpose(0, 1), target)

    alone = [Layer(), Layer()]
    x, target = torch.randn(T, B, D), torch.randn(B, T, D)
    mine = copy.deepcopy(alone[rank])
    stage = PipelineStage(mine, rank, 2, torch.device("cpu"))
    by_batch = TensorChunkSpec(1)
    how = {"args_chunk_spec": (by_batch,), "output_merge_spec": by_batch}
    schedule = ScheduleGPipe(stage, 2, loss_fn=loss, **how)
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=target)
    loss(alone[1](alone[0](x)), target).backward()
    assert_grads(mine, alone[rank])


def join_of_ranks_with_other_batches(rank, _):
    """Other numbers of steps in each batch, and other numbers of batches on each rank."""
    batches = [[torch.randn(steps, B, D) for steps in sizes] for sizes in ((5, 3, 4), (7,))]
    alone = Layer()
    model = nn.parallel.DistributedDataParallel(copy.deepcopy(alone))

    def step(model, optimizer, losses):
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with model.join():
        for x in batches[rank]:
            step(model, optimizer, [model(x).square().mean()])
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    for k in range(3):
        at_hand = [of_rank[k] for of_rank in batches if k < len(of_rank)]
        step(alone, optimizer, [alone(x).square().mean() / 2 for x in at_hand])
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    for mine, one in pairs:
        torch.testing.assert_close(mine, one)


def checkpoint_that_is_resharded(rank, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, alone = mesh_of(2), GRU(D, D)
    x = torch.randn(T, B, D)

    def with_weights(of, place):
        model = copy.deepcopy(of)
        for name, weight in [*model.named_parameters()]:
            setattr(model, name, nn.Parameter(distribute_tensor(weight.data, mesh, [place])))
        return model

    saved, loaded = with_weights(alone, Shard(0)), with_weights(GRU(D, D), Replicate())
    dcp.save(saved.state_dict(), checkpoint_id=folder)
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=folder)
    loaded.load_state_dict(state)
    got, _ = loaded(distribute_tensor(x, mesh, [Shard(1)]))
    torch.testing.assert_close(whole(got), alone(x)[0])
    one = GRU(D, D)
    state = one.state_dict()
    dcp.load(state, checkpoint_id=folder)
    one.load_state_dict(state)
    assert torch.equal(one(x)[0], alone(x)[0])


def parallelized_cell(rank, _):
    """Its hooks move between shards and DTensors at each step: a loop, which says so."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    alone, x = Cell(), torch.randn(T, B, D)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    mine = parallelize_module(copy.deepcopy(alone), mesh_of(2), plan)
    init = torch.zeros(B, D)
    with fallback("error"), pytest.raises(NotTraceableError):
        Recurrent(mine)(x, init)
    with fallback("allow"):
        got, _ = Recurrent(mine)(x, init)
    got.square().mean().backward()
    expected, _ = Recurrent(alone)(x, init)
    expected.square().mean().backward()
    torch.testing.assert_close(got, expected)
    assert_grads(mine, alone)


# --- four processes, two by two ---


def rnn(w, xs, h):
    def cell(h, x):
        h = torch.tanh(x + h @ w)
        return h, h

    return scan(cell, h, xs)


def decay(a, xs, h):
    def cell(h, x):
        h = a * h + x
        return h, torch.sin(h)

    return scan(cell, h, xs)


def mesh_of_two_dimensions(rank, _):
    """The batch, or time, along the first dimension; columns, or the batch, along the second."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, R = mesh_of(2, 2), Replicate()
    for fn, places in (
        (rnn, [(R, Shard(1)), (Shard(1), R), (Shard(0), R)]),
        (decay, [(R, R), (Shard(0), Shard(1)), (R, Shard(0))]),
    ):
        alone = [torch.randn(D, D) / 3 if fn is rnn else torch.rand(D)]
        alone += [torch.randn(5, B, D), torch.randn(B, D)]
        pairs = zip(alone, places, strict=True)
        sharded = [distribute_tensor(a, mesh, p).requires_grad_() for a, p in pairs]
        expected, got = fn(*(a.requires_grad_() for a in alone)), fn(*sharded)
        for results in (expected, got):
            sum(r.sin().sum() for r in results).backward()
        for mine, one in zip(got, expected, strict=True):
            torch.testing.assert_close(whole(mine), one, rtol=1e-4, atol=1e-5)
        for mine, one in zip(sharded, alone, strict=True):
            torch.testing.assert_close(whole(mine.grad), one.grad, rtol=1e-4, atol=1e-5)


def fsdp_around_tensor_parallel_weights(rank, _):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = mesh_of(2, 2, names=("dp", "tp"))
    alone, x = Cell(), torch.randn(T, B, D)
    mine = copy.deepcopy(alone)
    for linear, dim in ((mine.up, 0), (mine.down, 1)):
        weight = distribute_tensor(linear.weight.data, mesh["tp"], [Shard(dim)])
        linear.weight = nn.Parameter(weight)
    model = fully_shard(Recurrent(mine), mesh=mesh["dp"])
    own = x.chunk(2, 1)[mesh["dp"].get_local_rank()]
    own, init = (
        distribute_tensor(t, mesh["tp"], [Replicate()]) for t in (own, torch.zeros(B // 2, D))
    )
    got, _ = model(own, init)
    got.square().mean().backward()
    expected, _ = Recurrent(alone)(x, torch.zeros(B, D))
    expected.square().mean().backward()
    assert_grads(mine, alone)


def run(rank, check, processes, port, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=processes)
    try:
        torch.manual_seed(0)
        with fallback("error"):
            check(rank, folder)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("check", "processes"),
    [
        (pipeline_of_two_stages, 2),
        (join_of_ranks_with_other_batches, 2),
        (checkpoint_that_is_resharded, 2),
        (parallelized_cell, 2),
        (mesh_of_two_dimensions, 4),
        (fsdp_around_tensor_parallel_weights, 4),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_beside_one_process(check, processes, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(run, (check, processes, port, str(tmp_path)), nprocs=processes)
