"""Find the storages that nodes hold and change (checked on torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from torch_scan_hop._torch.operators import storage_of

Storage = int


def versions_of(values: Sequence[Any]) -> list[int]:
    """Return how often each tensor has been written to, as autograd counts; 0 for what is none."""
    return [v._version if isinstance(v, torch.Tensor) else 0 for v in values]


class Effects(fx.Interpreter):
    """Runs a graph on fakes; notes where each node's values are stored, and what it wrote."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.written: dict[fx.Node, set[Storage]] = {}
        self.storages: dict[fx.Node, set[Storage]] = {}
        self._alive: dict[Storage, list[torch.Tensor]] = {}

    def run_node(self, n: fx.Node) -> Any:
        before = self._versions()
        value = super().run_node(n)
        after = self._versions()
        self.written[n] = {s for s in before if before[s] != after[s]}
        tensors = [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]
        self.storages[n] = {storage_of(v) for v in tensors}
        for tensor in tensors:
            self._alive.setdefault(storage_of(tensor), []).append(tensor)
        return value

    def _versions(self) -> dict[Storage, int]:
        return {s: sum(t._version for t in tensors) for s, tensors in self._alive.items()}
