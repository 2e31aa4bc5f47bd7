"""Without torch_xla, the rest works, and the error says what to install."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is not None, reason="torch_xla is here")
def test_the_error_says_what_to_install():
    from torch_scan_hop.xla import _hlo  # noqa: F401

    with pytest.raises(ImportError, match=r"torch 2\.9 only.*pip install 'torch==2\.9\.1'"):
        from torch_scan_hop.xla.lower import lower_scan  # noqa: F401
