"""Sequence parallel: a sequence too long for one machine, of which each rank has a stretch.

    torchrun --nproc-per-node 2 sequence_parallel.py

The scan is the one of a single process; xs are a DTensor that is sharded over time. A step that is
affine in its carry, lane by lane, runs on all ranks at once: they exchange what their steps do
together, once. Other steps run rank by rank, and a warning says so.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from torch_scan_hop import scan

T, B, D = 64, 2, 5


def with_scan(xs: Tensor, decay: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.sigmoid(decay + x) * h + x
        return h, torch.tanh(h)

    return scan(step, h, xs)


def with_loop(xs: Tensor, decay: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    ys = []
    for x in xs:
        h = torch.sigmoid(decay + x) * h + x
        ys.append(torch.tanh(h))
    return h, torch.stack(ys)


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    sizes = ((T, B, D), (D,), (B, D))
    return tuple(torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in sizes)


def on_all_ranks() -> None:
    """Values and gradients, beside the loop over all steps in each process."""
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo")  # "nccl" on GPUs
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = inputs()
    places = Shard(0), Replicate(), Replicate()
    pairs = zip(whole, places, strict=True)
    sharded = [distribute_tensor(t.detach(), mesh, [p]).requires_grad_() for t, p in pairs]
    h, ys = with_scan(*sharded)
    ys.square().sum().backward()
    expected_h, expected = with_loop(*whole)
    expected.square().sum().backward()
    torch.testing.assert_close(h.full_tensor(), expected_h)
    torch.testing.assert_close(ys.full_tensor(), expected)
    for mine, one in zip(sharded, whole, strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), one.grad)
    print(f"rank {dist.get_rank()}: {len(ys.to_local())} of {T} steps, as the loop has them")
    dist.destroy_process_group()


if __name__ == "__main__":
    import sys

    from compare import main

    if "RANK" in os.environ:  # torchrun sets it
        on_all_ranks()
    else:
        main(sys.modules[__name__])
