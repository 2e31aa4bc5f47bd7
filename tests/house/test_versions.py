"""What the package says of versions, and what it costs to import."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch

import torch_scan_hop
from torch_scan_hop import versions


def test_a_report_names_what_matters(capsys):
    torch_scan_hop.show_versions()
    printed = capsys.readouterr().out
    for value in (torch_scan_hop.__version__, torch.__version__, sys.version.split()[0]):
        assert value in printed


def test_a_torch_that_nobody_has_tried_is_said_to_be_one(monkeypatch):
    monkeypatch.setattr(versions, "NEWEST_TORCH", (2, 8))
    with pytest.warns(UserWarning, match=r"checked on torch 2.9 to 2.8, not on"):
        versions.warn_of_unknown_torch()


def test_a_torch_that_was_tried_is_no_news():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.warn_of_unknown_torch()


@pytest.mark.torch_version
def test_an_import_warns_of_nothing():
    """Of ours: what torch itself warns of on the way is not for us to mend."""
    code = "import torch, torch._dynamo, warnings; warnings.simplefilter('error'); import torch_scan_hop"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
