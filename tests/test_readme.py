"""The README's example runs, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import torch_scan_hop

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_five_line_example():
    example = re.search(r"```python\n(import torch.*?)```", README, re.DOTALL)
    assert example is not None
    namespace: dict[str, object] = {}
    exec(example[1], namespace)
    assert namespace["hs"].shape == (100, 4, 16)
    assert namespace["w"].grad is not None and namespace["u"].grad is not None


def test_names_in_the_readme_exist():
    for path in set(re.findall(r"`torch_scan_hop((?:\.\w+)+)", README)):
        target = torch_scan_hop
        for name in path.strip(".").split("."):
            if not hasattr(target, name):
                __import__(f"{target.__name__}.{name}")
            target = getattr(target, name)
    assert torch.ops.higher_order.scan is not None
