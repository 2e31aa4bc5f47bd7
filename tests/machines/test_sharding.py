"""Scans of DTensors on loopback: numbers of one process, collectives.

On two processes all of it; on four, what depends on their number.
"""

from __future__ import annotations

import collections
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import torch_scan_hop
from torch_scan_hop import scan, scan_layers
from torch_scan_hop.fallback import forget_reasons

pytestmark = [
    pytest.mark.torch_version,
    pytest.mark.works("DTensor"),
    pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed"),
]
T, B, D, H, LAYERS = 6, 4, 8, 8, 3


def rnn(wx, wh, xs, h):
    def cell(h, x):
        h = torch.tanh(x @ wx + h @ wh)
        return h, h

    return scan(cell, h, xs)


class Block(nn.Module):
    def __init__(self, up, down):
        super().__init__()
        self.up, self.down = nn.Parameter(up), nn.Parameter(down)

    def forward(self, x):
        return x + torch.relu(x @ self.up) @ self.down


def rnn_arguments(batch=B):
    shapes = (D, H), (H, H), (T, batch, D), (batch, H)
    return [torch.randn(shape) * 0.5 for shape in shapes]


#: placements of (wx, wh, xs, init); the collectives of the forward, None for any
RNNS = {
    "columns": ("S1 S1 R R", {"all_gather": T}),
    "rows": ("S0 S0 R R", {"all_reduce": T}),
    "batch": ("R R S1 S0", {}),
    "batch and init of all": ("R R S1 R", {}),
    "everything of all": ("R R R R", {}),
}


def gated(a, xs, h):
    def cell(h, x):
        h = torch.sigmoid(a) * h + (1 - a) * x
        return h, torch.sin(h)

    return scan(cell, h, xs)


def coupled(a, xs, h):
    """Backwards; the second carry is driven by the first, which is reset where x is large."""

    def cell(carry, x):
        h, g = carry
        h = torch.where(x > 1, 0.0, torch.lerp(h, x, a))
        g = (g - h / (1 + x * x)) / 2
        return (h, g), h * g

    (h, g), ys = scan(cell, (h, 2 * h), xs, reverse=True)
    return h, g, ys


def squashed(a, xs, h):
    """Not affine, but its derivative is."""

    def cell(h, x):
        h = torch.tanh(a * h + x)
        return h, h

    return scan(cell, h, xs)


#: of the forward, with P processes: (all_gathers, whether a warning says that ranks take turns)
OVER_TIME = {
    gated: lambda P: (1, False),
    coupled: lambda P: (1, False),
    squashed: lambda P: (P, True),
    rnn: lambda P: (P, True),
}


def placement(name):
    from torch.distributed.tensor import Replicate, Shard

    return Replicate() if name == "R" else Shard(int(name[1:]))


def counted(fn):
    """What ``fn`` gives, and the collectives that gloo ran for it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = fn()
    names = (e.name for e in profile.events() if e.name.startswith("gloo:"))
    return result, dict(collections.Counter(name.removeprefix("gloo:") for name in names))


def loss(results):
    return sum(r.sin().sum() for r in results)


def assert_whole(got, expected):
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g.full_tensor(), e, rtol=1e-4, atol=1e-5)


def compiled(fn, backend):
    torch._dynamo.reset()
    return fn if backend == "eager" else torch.compile(fn, backend=backend, fullgraph=True)


def check_rnn(mesh, backend, name, batch=B):
    from torch.distributed.tensor import distribute_tensor

    torch.manual_seed(0)
    places, collectives = RNNS[name]
    whole = rnn_arguments(batch)
    pairs = zip(whole, places.split(), strict=True)
    sharded = [distribute_tensor(w, mesh, [placement(p)]).requires_grad_() for w, p in pairs]
    expected = rnn(*(w.requires_grad_() for w in whole))
    loss(expected).backward()
    run = compiled(rnn, backend)
    for _ in range(2):  # the first call captures and compiles
        got, found = counted(lambda: run(*sharded))
    assert found == collectives, (name, found)
    _, found = counted(loss(got).backward)
    if name.startswith(("batch", "everything")):
        # at the end, of the final state and of the loss, if at all
        assert sum(found.values()) <= 2, (name, found)
    assert_whole(got, expected)
    assert_whole([s.grad for s in sharded], [w.grad for w in whole])


def check_over_time(mesh, backend, fn, steps):
    """xs of each rank are its own, also where ranks have a different number of them, or none."""
    from torch.distributed.tensor import distribute_tensor

    torch.manual_seed(0)
    places = "R S0 R" if fn is not rnn else "R R S0 R"
    whole = rnn_arguments()[:2] if fn is rnn else [torch.rand(D)]
    whole += [torch.randn(steps, B, D), torch.randn(B, D)]
    pairs = zip(whole, places.split(), strict=True)
    sharded = [distribute_tensor(w, mesh, [placement(p)]).requires_grad_() for w, p in pairs]
    expected = fn(*(w.requires_grad_() for w in whole))
    loss(expected).backward()
    forget_reasons()
    run = compiled(fn, backend)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got = run(*sharded)
        got, found = counted(lambda: run(*sharded))
        _, found_back = counted(loss(got).backward)
    gathers, in_turn = OVER_TIME[fn](mesh.size())
    edges = 0 if backend == "eager" else 1  # torch.compile may exchange them in the forward
    assert gathers <= found["all_gather"] <= gathers + edges, (fn.__name__, found)
    if fn is not rnn:  # the carries at the borders, the composed steps; and of the loss
        assert found_back.get("all_gather", 0) <= 2, (fn.__name__, found_back)
    assert any("run one after another" in str(w.message) for w in said) == in_turn
    assert all(y.placements == (placement("S0"),) for y in got[-1:])
    assert_whole(got, expected)
    assert_whole([s.grad for s in sharded], [w.grad for w in whole])


def check_layers(mesh, backend):
    """Two products of a layer: by columns, then by rows, and one sum over the ranks."""
    from torch.distributed.tensor import distribute_tensor

    torch.manual_seed(0)
    ups, downs = torch.randn(LAYERS, D, 16) * 0.3, torch.randn(LAYERS, 16, D) * 0.3
    x = torch.randn(B, D)

    def layers(place):
        pairs = zip(ups, downs, strict=True)
        return nn.ModuleList(Block(place(u, "S1"), place(d, "S0")) for u, d in pairs)

    alone = layers(lambda w, _: w.clone())
    sharded = layers(lambda w, p: distribute_tensor(w.clone(), mesh, [placement(p)]))
    expected = scan_layers(alone, x)
    expected.sin().sum().backward()
    run = compiled(lambda x: scan_layers(sharded, x), backend)
    x = distribute_tensor(x, mesh, [placement("R")])
    for _ in range(2):
        got, found = counted(lambda: run(x))
    assert found == {"all_reduce": LAYERS}, found
    got.sin().sum().backward()
    assert_whole([got], [expected])
    pairs = zip(sharded.parameters(), alone.parameters(), strict=True)
    for mine, whole in pairs:
        assert_whole([mine.grad], [whole.grad])


def check_layer_of_nn(mesh, backend):
    """``torch_scan_hop.nn`` over a batch that is sharded: lengths, and no collective."""
    from torch.distributed.tensor import distribute_tensor

    torch.manual_seed(0)
    alone, sharded = torch_scan_hop.nn.LSTM(D, H), torch_scan_hop.nn.LSTM(D, H)
    sharded.load_state_dict(alone.state_dict())
    for name, weight in [*sharded.named_parameters()]:
        setattr(sharded, name, nn.Parameter(distribute_tensor(weight.data, mesh, [placement("R")])))
    x = torch.randn(T, B, D)
    expected, _ = alone(x)
    expected.sin().sum().backward()
    run = compiled(lambda x: sharded(x)[0], backend)
    x = distribute_tensor(x, mesh, [placement("S1")])
    for _ in range(2):
        got, found = counted(lambda: run(x))
    assert found == {}, found
    got.sin().sum().backward()
    assert_whole([got], [expected])
    for mine, whole in zip(sharded.parameters(), alone.parameters(), strict=True):
        assert_whole([mine.grad], [whole.grad])


def check_second_derivative(mesh):
    from torch.distributed.tensor import distribute_tensor

    torch.manual_seed(0)
    whole = rnn_arguments()
    found = []
    for places in (None, "S1 S1 R R", "R R S1 S0", "R R S0 R"):
        given = [w.clone() for w in whole]
        if places is not None:
            pairs = zip(given, places.split(), strict=True)
            given = [distribute_tensor(w, mesh, [placement(p)]) for w, p in pairs]
        given = [g.requires_grad_() for g in given]
        first = torch.autograd.grad(loss(rnn(*given)), given, create_graph=True)
        loss(first).backward()
        grads = [g.grad for g in given]
        found.append(grads if places is None else [g.full_tensor() for g in grads])
    for got in found[1:]:
        torch.testing.assert_close(got, found[0], rtol=1e-4, atol=1e-5)


def check_all(rank, port, processes, backend):
    from torch.distributed.device_mesh import init_device_mesh

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=processes)
    try:
        mesh = init_device_mesh("cpu", (processes,))
        with torch_scan_hop.fallback("error"):
            if processes == 4:  # each process captures and compiles, on however few cores
                check_rnn(mesh, backend, "columns")
                check_rnn(mesh, backend, "batch", batch=5)
                check_over_time(mesh, backend, gated, steps=5)  # the last rank has none
                return
            for name in RNNS:
                check_rnn(mesh, backend, name)
            check_rnn(mesh, backend, "batch", batch=5)  # no part is as large as another
            for fn in OVER_TIME if backend == "eager" else (gated, rnn):
                check_over_time(mesh, backend, fn, steps=5)
            check_layers(mesh, backend)
            check_layer_of_nn(mesh, backend)
            if backend == "eager":
                check_second_derivative(mesh)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_numbers_and_collectives(backend, processes):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(check_all, (port, processes, backend), nprocs=processes)


@pytest.mark.slow
def test_the_recipe_of_sequence_parallel():
    recipe = Path(__file__).parents[2] / "examples" / "cookbook" / "sequence_parallel.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", recipe], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("32 of 64 steps") == 2
    assert "one after another" not in done.stderr
