"""Random steps of small matrices, each one kernel each way, with the loop's numbers."""

from __future__ import annotations

import random

import pytest
import torch
from oracle import assert_same, gradients, loop, zeros_for_none

from torch_scan_hop import scan
from torch_scan_hop.inductor.watch import watching
from torch_scan_hop.rewrites import using_options

pytestmark = pytest.mark.torch_version

#: of matrices (m), definite ones (d), vectors (v) and numbers (s) of each lane; W is a weight
RULES = {
    "m": [
        "torch.tanh({m} @ {m})", "{m} @ W", "W @ {m}", "{m}.mT", "{v}[..., None] * {v}[..., None, :]",
        "torch.linalg.solve({d}, {m})", "torch.linalg.solve(W + EYE * 3, {m})", "torch.linalg.solve({d}, {m}, left=False)", "{m} * {s}[..., None, None]",
        "torch.linalg.inv({d})", "torch.linalg.cholesky({d})", "torch.softmax({m}, -1)",
        "torch.linalg.solve_triangular(torch.linalg.cholesky({d}), {m}, upper=False)",
        "torch.cholesky_solve({m}, torch.linalg.cholesky({d}))", "torch.where({m} > 0.1, {m}, {m})",
        "torch.cat([{m}[..., 1:, :], {v}[..., None, :]], -2)", "torch.stack([{v}] * N, -1)",
        "{m}.flip(-1)", "{m} + torch.diag_embed({v})", "{m}.tril() + W",
    ],
    "d": ["{m} @ {m}.mT * 0.1 + EYE * 2", "{v}[..., None] * {v}[..., None, :] * 0.2 + EYE"],
    "v": [
        "({m} @ {v}[..., None])[..., 0]", "torch.tanh({v})", "{m}.sum(-1)", "{m}.diagonal(0, -2, -1)",
        "torch.linalg.solve({d}, {v})", "{v} @ W", "{v} - {v}.mean(-1, keepdim=True)", "{m}[..., 0]",
        "{m}.amax(-2)", "torch.logsumexp({m} + {v}[..., None, :], -1)", "{v} / (1 + {v}.norm(dim=-1, keepdim=True))",
        "torch.cat([{v}[..., 1:], {v}[..., :1]], -1)",
    ],
    "s": ["torch.logdet({d})", "({v} * {v}).sum(-1)", "{v}[..., 1]", "torch.sin({s})",
          "torch.linalg.slogdet({m} + EYE * 3)[1]", "torch.linalg.det({d})", "{m}.mean((-2, -1))"],
}  # fmt: skip


def random_step(seed, n):
    """Return the source of ``step((P, h, c), (x, z))``, whose carries stay small."""
    draw = random.Random(seed)
    pool = {"m": ["P", "x"], "d": [], "v": ["h", "z"], "s": ["c"]}
    lines = [f"N, EYE = {n}, torch.eye({n}, dtype=W.dtype)"]

    def value(kind):
        if kind == "d" and (not pool["d"] or draw.random() < 0.3):
            return made("d")
        return draw.choice(pool[kind][-4:])

    def made(kind):
        text = draw.choice(RULES[kind])
        while "{" in text:
            wanted = text[text.index("{") + 1]
            text = text.replace(f"{{{wanted}}}", value(wanted), 1)
        name = f"{kind}{len(lines)}"
        lines.append(f"{name} = {text}")
        pool[kind].append(name)
        return name

    for _ in range(draw.randint(4, 9)):
        made(draw.choice("mmmvvs"))
    lines.append(f"P = torch.tanh({value('m')} + P * 0.3)")
    lines.append(f"h = torch.tanh({value('v')} * 0.5 + h)")
    lines.append(f"c = torch.tanh({value('s')} + 0.1 * c)")
    ys = [value(draw.choice("mvs")) for _ in range(draw.randint(1, 3))]
    lines.append(f"return (P, h, c), ({', '.join(ys)},)")
    return "def step(carry, given):\n    (P, h, c), (x, z) = carry, given\n    " + "\n    ".join(
        lines
    )


def problem(seed):
    draw = random.Random(-1 - seed)
    n, lanes = draw.choice([2, 3, 4, 5]), draw.choice([None, 2, 3, 5, 9, 19])
    g = torch.Generator().manual_seed(seed)
    batch = [] if lanes is None else [lanes]
    randn = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64)  # noqa: E731
    source, names = random_step(seed, n), {"torch": torch, "W": randn(n, n) * 0.5}
    exec(source, names)
    T = draw.choice([1, 3, 6])
    init = tuple(randn(*batch, *own) * 0.3 for own in ((n, n), (n,), ()))
    xs = tuple(randn(T, *batch, *own) * 0.3 for own in ((n, n), (n,)))
    return source, names["step"], names["W"], init, xs, draw.random() < 0.4


def check(seed):
    source, step, weight, init, xs, reverse = problem(seed)
    wrt = [t.requires_grad_() for t in (*init, *xs, weight)]
    kernels = []

    def train(run):
        results = run(init, xs)
        return results, zeros_for_none(gradients(results, wrt), wrt)

    compiled = torch.compile(lambda i, x: scan(step, i, x, reverse=reverse), fullgraph=True)
    with (
        using_options(scalars=False),
        watching(lambda _, node, __: kernels.append(type(node).__name__)),
        torch._inductor.config.patch(force_disable_caches=True),
    ):
        got = train(compiled)
    want = train(lambda i, x: loop(step, i, x, reverse=reverse))
    try:
        assert_same(got, want, 1e-8)
    except AssertionError as error:
        raise AssertionError(f"{source}\n\n{kernels}") from error
    return kernels


@pytest.mark.parametrize(
    "seed", [3, *(pytest.param(k, marks=pytest.mark.slow) for k in range(4, 28))]
)
def test_a_random_step(seed):
    steps = len(problem(seed)[4][0])
    # one step is no loop
    assert check(seed)[0] == "MatricesKernel" or steps == 1


@pytest.mark.parametrize("scalars", [True, False])
def test_products_of_vectors_and_all(scalars):
    """No kernel has rules for ``mv``, ``dot`` and ``all``: torch writes them as other operators."""
    weight = torch.randn(3, 3, generator=torch.Generator().manual_seed(0)) * 0.5
    kernels = []

    def step(h, x):
        h = torch.tanh(torch.mv(weight, h) + x)
        return h, torch.dot(h, x) * (h > -0.5).all()

    given = torch.zeros(3), torch.linspace(-1, 1, 12).reshape(4, 3)
    with using_options(scalars=scalars), watching(lambda _, node, __: kernels.append(node)):
        got = torch.compile(lambda h, xs: scan(step, h, xs), fullgraph=True)(*given)
    assert_same(got, loop(step, *given), 1e-5)
    assert all(kernels) and len(kernels) == 1
