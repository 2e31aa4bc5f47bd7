"""What a scan must compute: the Python loop of ``torch_scan_hop.reference``, in float64.

:func:`check` compares values and gradients of one implementation variant with the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_scan_hop import scan, tree
from torch_scan_hop.reference import scan_loop

# relative and absolute, for a few steps of a few units
TOLERANCE = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 2e-4,
    torch.complex64: 2e-4,
    torch.bfloat16: 6e-2,
    torch.float16: 2e-2,
}


Steps = Callable[[Any, Any, Any, int, bool], tuple[Any, Any]]


def with_signature_of_scan(steps: Steps) -> Callable[..., tuple[Any, Any]]:
    """``steps(combine_fn, init, xs, trip_count, reverse)`` over dimension 0, as a ``scan``."""

    def loop(
        combine_fn: Any,
        init: Any,
        xs: Any = None,
        length: int | None = None,
        *,
        dim: int = 0,
        reverse: bool = False,
        **_: Any,
    ) -> tuple[Any, Any]:
        leaves = tree.tensors(xs)
        trip_count: Any = leaves[0].shape[dim] if leaves else length
        place = dim if dim >= 0 or not leaves else dim + leaves[0].ndim
        moved = tree.map_leaves(lambda leaf: torch.movedim(leaf, dim, 0), xs)
        carry, ys = steps(combine_fn, init, moved, trip_count, reverse)
        if place:
            ys = tree.map_leaves(lambda y: torch.movedim(y, 0, place) if place < y.ndim else y, ys)
        return carry, ys

    return loop


def written_loop(combine_fn: Any, init: Any, xs: Tensor) -> tuple[Any, Tensor]:
    """What a user would write; the reference copies init, and so knows less about it."""
    carry, ys = init, []
    for x in xs.unbind(0):
        carry, y = combine_fn(carry, x)
        ys.append(y)
    return carry, torch.stack(ys)


def reference_steps(
    combine_fn: Any, init: Any, xs: Any, trip_count: int, reverse: bool
) -> tuple[Any, Any]:
    """The reference loop. Numbers in init are float64."""
    init = tree.map_leaves(
        lambda v: v if isinstance(v, Tensor) else torch.tensor(v, dtype=_number_dtype(v)), init
    )
    return scan_loop(combine_fn, init, xs, trip_count, reverse)


loop = with_signature_of_scan(reference_steps)


def _number_dtype(value: Any) -> torch.dtype | None:
    return {float: torch.float64, complex: torch.complex128}.get(type(value))


@dataclass(frozen=True)
class Variant:
    """A way to run a scan: with these options, compiled by this backend or not at all."""

    backend: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    exported: bool = False

    def __call__(self, combine_fn: Any, init: Any, xs: Any = None, **kwargs: Any) -> Any:
        def run(init: Any, xs: Any) -> Any:
            return scan(combine_fn, init, xs, **self.options, **kwargs)

        if self.exported:
            return _exported(run, (init, xs))(init, xs)
        if self.backend is not None:
            run = torch.compile(run, backend=self.backend, fullgraph=True)
        return run(init, xs)


def _exported(run: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """``run`` as an exported program. Its closures are constants there, gradients included."""

    class Program(torch.nn.Module):
        def forward(self, init: Any, xs: Any) -> Any:
            return run(init, xs)

    return torch.export.export(Program(), args, strict=False).module()


VARIANTS = {
    "eager": Variant(),
    "compile_eager": Variant("eager"),
    "aot_eager": Variant("aot_eager"),
    "inductor": Variant("inductor"),
    "unroll3": Variant(options={"unroll": 3}),
    "unroll3_aot_eager": Variant("aot_eager", {"unroll": 3}),
    "checkpoint": Variant(options={"checkpoint": "full"}),
    "checkpoint_aot_eager": Variant("aot_eager", {"checkpoint": "full"}),
}


def assert_same(actual: Any, expected: Any, tolerance: float = 1e-9, dtype: bool = True) -> None:
    """Equal pytrees of tensors; ``dtype=False`` lets the expected values be float64."""
    got, want = tree.leaves_with_paths(actual, "result"), tree.leaves_with_paths(expected, "result")
    assert [p for p, _ in got] == [p for p, _ in want]
    for (path, a), (_, e) in zip(got, want, strict=True):
        if e is None or a is None:
            assert a is None and e is None, path
            continue
        torch.testing.assert_close(
            a,
            e,
            rtol=tolerance,
            atol=tolerance,
            check_dtype=dtype,
            check_stride=False,
            equal_nan=True,
            msg=lambda text, path=path: f"{path}: {text}",
        )


def differentiable(value: Any) -> list[Tensor]:
    return [
        t
        for t in tree.tensors(value)
        if isinstance(t, Tensor) and (t.dtype.is_floating_point or t.dtype.is_complex)
    ]


def scalar(result: Any) -> Tensor:
    """One number that depends on every differentiable leaf, each with weights of its own."""
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=torch.float64)
    for leaf in differentiable(result):
        real = torch.view_as_real(leaf) if leaf.dtype.is_complex else leaf
        weight = torch.randn(real.shape, dtype=torch.float64, generator=generator)
        total = total + (real.to(torch.float64) * weight).sum()
    return total


def gradients(result: Any, wrt: list[Tensor]) -> list[Tensor | None]:
    total = scalar(result)
    if not total.requires_grad:
        return [None] * len(wrt)
    return list(torch.autograd.grad(total, wrt, allow_unused=True))


def zeros_for_none(gradients: list[Tensor | None], wrt: list[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(w) if g is None else g for g, w in zip(gradients, wrt, strict=True)]


def require_grad(value: Any) -> Any:
    """``value`` as leaves of autograd, where that is possible."""

    def leaf(v: Any) -> Any:
        if isinstance(v, Tensor) and (v.dtype.is_floating_point or v.dtype.is_complex):
            return v.detach().requires_grad_()
        return v

    return tree.map_leaves(leaf, value)


def check(
    combine_fn: Any,
    init: Any,
    xs: Any = None,
    *,
    variant: Variant | None = None,
    params: tuple[Tensor, ...] | list[Tensor] = (),
    tolerance: float = 1e-9,
    **kwargs: Any,
) -> Any:
    """Values, and gradients for everything differentiable, equal the loop's; returns the result."""
    variant = variant or Variant()
    init, xs = require_grad(init), require_grad(xs)
    actual = variant(combine_fn, init, xs, **kwargs)
    expected = loop(combine_fn, init, xs, **kwargs)
    assert_same(actual, expected, tolerance)
    wrt = [*differentiable(init), *differentiable(xs), *params]
    wrt = [w for w in wrt if w.requires_grad]
    if wrt:
        assert_same(
            zeros_for_none(gradients(actual, wrt), wrt),
            zeros_for_none(gradients(expected, wrt), wrt),
            tolerance,
        )
    return actual


def sum_with_weights_backwards(y: Tensor) -> Tensor:
    """A sum whose gradient for ``y`` has its dimensions backwards in memory."""
    weights = torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64).reshape(y.shape[::-1])
    return (y.permute(*reversed(range(y.ndim))) * weights).sum()


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Of the seed that each test starts from."""
    return torch.randn(shape, dtype=dtype)


def randn_of_shape(*shape: int) -> Tensor:
    """float32, and the same for a shape wherever it is made, modules' constants included."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
