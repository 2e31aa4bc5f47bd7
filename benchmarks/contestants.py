"""The columns of the table: ways to run one case, forward and forward + backward.

Every contestant takes the same inputs and gives the same output and gradients, for the same
dense cotangent; none computes a loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.workloads import Case, Workload, case
from torch_scan_hop import scan

Run = Callable[[Any, Any], tuple[Any, Any]]  # (init, xs) -> (carry, ys)
Call = Callable[[], Any]

LOOP, EAGER, COMPILED, CPP = "eager loop", "ours eager", "ours compiled", "ours compiled, cpp"
UNROLLED, THEIRS, JAX, COPY = "loop unrolled by Inductor", "torch scan", "jax", "copy"
UNROLLED_STEPS = 16


class Skipped(Exception):
    """A contestant that cannot run; the message is the reason."""


@dataclass(frozen=True)
class Contestant:
    forward: Call
    train: Call
    #: the output, then the gradients, as torch tensors; None: nothing to compare
    results: Callable[[], list[Tensor]] | None
    scale: float = 1.0  # of its times, where it runs fewer steps


def python_loop(cell: Any, init: Any, xs: Any, reverse: bool = False) -> tuple[Any, Any]:
    """What a user writes today."""
    leaves, spec = torch.utils._pytree.tree_flatten(xs)
    steps = list(zip(*(leaf.unbind(0) for leaf in leaves), strict=True))
    carry, ys = init, []
    for parts in reversed(steps) if reverse else steps:
        carry, y = cell(carry, torch.utils._pytree.tree_unflatten(parts, spec))
        ys.append(y)
    if ys[0] is None:
        return carry, None
    return carry, torch.stack(ys[::-1] if reverse else ys)


def of_torch(given: Case, run: Run) -> Contestant:
    init, xs = given.problem.init, given.problem.xs

    def forward() -> Tensor:
        with torch.no_grad():
            return given.output(run(init, xs))

    def train() -> tuple[Tensor, ...]:
        output = given.output(run(init, xs))
        return (output, *torch.autograd.grad(output, given.wanted, given.cotangent))

    return Contestant(forward, train, lambda: list(train()))


def _loop(workload: Workload, given: Case) -> Contestant:
    return of_torch(given, partial(python_loop, given.loop_cell, reverse=given.reverse))


def ours(given: Case, init: Any, xs: Any, **options: Any) -> tuple[Any, Any]:
    return scan(given.problem.combine_fn, init, xs, reverse=given.reverse, **options)


def _eager(workload: Workload, given: Case) -> Contestant:
    return of_torch(given, partial(ours, given))


def compiled(given: Case, **options: Any) -> Contestant:
    cell, reverse = given.problem.combine_fn, given.reverse

    def run(init: Any, xs: Any) -> tuple[Any, Any]:
        return scan(cell, init, xs, reverse=reverse)

    return of_torch(given, torch.compile(run, fullgraph=True, dynamic=False, options=options))


def _compiled(workload: Workload, given: Case) -> Contestant:
    return compiled(given, cpp_wrapper=False)


def _cpp(workload: Workload, given: Case) -> Contestant:
    return compiled(given, cpp_wrapper=True)


def _unrolled(workload: Workload, given: Case) -> Contestant:
    short = case(workload, min(UNROLLED_STEPS, workload.T))
    run = torch.compile(partial(python_loop, short.loop_cell), dynamic=False)
    contestant = of_torch(short, run)
    scale = workload.T / min(UNROLLED_STEPS, workload.T)
    return Contestant(contestant.forward, contestant.train, None, scale)


@contextlib.contextmanager
def _their_operator(operator: Any) -> Iterator[None]:
    """Importing our package takes the operator's name over: graphs of theirs would run ours."""
    current = torch.ops.higher_order.scan
    torch.ops.higher_order.scan = operator
    try:
        yield
    finally:
        torch.ops.higher_order.scan = current


def _theirs(workload: Workload, given: Case) -> Contestant:
    from torch._higher_order_ops.scan import scan as their_scan
    from torch._higher_order_ops.scan import scan_op as their_operator

    def cell(carry: Any, x: Any) -> tuple[Any, Any]:
        carry, y = given.problem.combine_fn(carry, x)
        # it refuses results that alias one another
        return carry, None if y is None else y.clone()

    def under_its_name(call: Call) -> Call:
        def run() -> Any:
            with _their_operator(their_operator):
                return call()

        return run

    it = of_torch(given, lambda init, xs: their_scan(cell, init, xs, dim=0, reverse=given.reverse))
    train = under_its_name(it.train)
    return Contestant(under_its_name(it.forward), train, lambda: list(train()))


def _module(workload: Workload, given: Case) -> Contestant:
    fused = workload.module(given.problem.params)
    if fused is None:
        raise Skipped("torch ships no such module")
    xs, wanted = given.problem.xs, [*fused.parameters, given.problem.xs]

    def forward() -> Tensor:
        with torch.no_grad():
            return fused.module(xs)[0]

    def train() -> tuple[Tensor, ...]:
        output = fused.module(xs)[0]
        return (output, *torch.autograd.grad(output, wanted, given.cotangent))

    def results() -> list[Tensor]:
        output, *gradients, dx = train()
        return [output, *fused.gradients(gradients), dx]

    return Contestant(forward, train, results)


def _jax(workload: Workload, given: Case) -> Contestant:
    try:
        import jax
    except ImportError:
        raise Skipped("jax is not installed") from None
    # a copy of the values: numpy has no view of a tensor's lazy conjugate
    to_jax = partial(
        torch.utils._pytree.tree_map, lambda t: jax.numpy.asarray(t.detach().resolve_conj().numpy())
    )
    problem = given.problem
    params, init, xs = to_jax(problem.params), to_jax(problem.init), to_jax(problem.xs)
    # of complex values, jax's gradients are the conjugates of torch's
    cotangent = to_jax(given.cotangent.conj())

    def run(params: Any, xs: Any) -> Any:
        cell = partial(workload.jax_cell, jax, params)
        carry, ys = jax.lax.scan(cell, init, xs, reverse=given.reverse)
        return jax.tree.leaves(carry)[0] if ys is None else ys

    def value_and_gradients(params: Any, xs: Any, cotangent: Any) -> Any:
        output, pull = jax.vjp(run, params, xs)
        return output, pull(cotangent)

    forward, both = jax.jit(run), jax.jit(value_and_gradients)

    def train() -> Any:
        return jax.block_until_ready(both(params, xs, cotangent))

    def results() -> list[Tensor]:
        output, (d_params, dx) = train()
        # jax orders dicts by key, torch by insertion
        ordered = [*(d_params[k] for k in problem.params), *jax.tree.leaves(dx)]
        found = [torch.tensor(v.__array__()) for v in (output, *ordered)]
        return [found[0], *(gradient.conj() for gradient in found[1:])]

    return Contestant(lambda: jax.block_until_ready(forward(params, xs)), train, results)


def _copy(workload: Workload, given: Case) -> Contestant:
    copies = workload.same_bytes(given)
    if copies is None:
        raise Skipped("not bound by memory")
    return Contestant(copies.forward, copies.train, None)


CONTESTANTS: dict[str, Callable[[Workload, Case], Contestant]] = {
    LOOP: _loop,
    EAGER: _eager,
    COMPILED: _compiled,
    CPP: _cpp,
    "nn module": _module,
    JAX: _jax,
    THEIRS: _theirs,
    COPY: _copy,
    UNROLLED: _unrolled,
}


def names(only: str | None = None, slow: bool = False) -> Iterator[str]:
    for name in CONTESTANTS:
        if name == UNROLLED and not slow:
            continue
        if (only == "eager" and name in (COMPILED, CPP)) or (only == "compiled" and name == EAGER):
            continue
        yield name
