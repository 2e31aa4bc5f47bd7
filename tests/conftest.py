"""Every test starts from the same seed, and leaves no compiled code behind."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh_torch():
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
