"""Each recipe of ``examples/cookbook`` against the loop beside it: eager, compiled, in its script."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracle import check

FOLDER = Path(__file__).parents[2] / "examples" / "cookbook"
RECIPES = sorted(p.stem for p in FOLDER.glob("*.py") if p.stem != "compare")


@pytest.fixture
def recipe(request, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(request.param)


def test_they_are_found():
    assert {"lru", "kalman", "maml", "stacked_layers"} <= set(RECIPES) and len(RECIPES) >= 18


@pytest.mark.parametrize("recipe", RECIPES, indirect=True)
@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_recipe(recipe, backend):
    from compare import largest_difference, values_and_gradients

    if recipe.__name__ == "stacked_layers" and torch.__version__ < "2.10":
        pytest.skip("fakes of torch 2.9 say float32 of what attention in float64 saves")
    run = recipe.with_scan
    if backend != "eager":
        run = torch.compile(run, backend=backend, fullgraph=True)
    inputs = recipe.inputs()
    expected = values_and_gradients(recipe.with_loop, inputs)
    assert largest_difference(values_and_gradients(run, inputs), expected) < 1e-8


@pytest.mark.slow
def test_a_recipe_is_a_script():
    result = subprocess.run(
        [sys.executable, FOLDER / "gae.py"], capture_output=True, text=True, timeout=300
    )
    assert "scan, compiled" in result.stdout, result.stderr[-3000:]


@pytest.mark.parametrize("kind", [torch.nn.RNN, torch.nn.GRU, torch.nn.LSTM])
def test_a_whole_nn_rnn_in_each_step_is_captured(kind):
    """Dynamo breaks its graph where these are mentioned; in a body it does not."""
    module = kind(4, 4, batch_first=True).double()

    def body(h, x):
        y, _ = module(x.expand(2, 3, 4) + h)
        return y.mean(1, keepdim=True).expand(2, 3, 4), y

    check(
        body,
        torch.zeros(2, 3, 4, dtype=torch.float64),
        torch.randn(5, 4, dtype=torch.float64),
        params=list(module.parameters()),
    )
