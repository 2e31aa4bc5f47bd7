"""Every test starts from the same seed, and leaves no compiled code behind."""

from __future__ import annotations

import pytest
import torch

from torch_scan_hop import capture
from torch_scan_hop.fallback import forget_reasons


def pytest_configure(config):
    # a scan that ran as a Python loop proves nothing about the operator
    config.addinivalue_line("filterwarnings", "error:torch_scan_hop")


@pytest.fixture(autouse=True)
def _no_rewrite_is_dropped(request, caplog):
    """What fails on the way is left out and logged: right for users, and a bug all the same."""
    yield
    if "faults" in request.keywords:
        return
    dropped = [r for r in caplog.get_records("call") if r.name.startswith("torch_scan_hop")]
    assert not dropped, dropped[0].getMessage()


@pytest.fixture(autouse=True)
def _fresh_torch():
    torch.manual_seed(0)
    forget_reasons()
    yield
    torch._dynamo.reset()
    capture._entries.clear()
