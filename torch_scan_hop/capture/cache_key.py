"""The part of the key in torch's caches that says what a compiled scan depends on besides its
graph.

torch hashes the attributes of graph modules along with their code, and keeps ``meta`` when it
copies one: each captured body carries its part of the key there.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import torch
from torch import fx

from torch_scan_hop.rewrites.options import current_options


@functools.cache
def _source() -> str:
    """Return a hash of this package's source, because a version number may outlive an edit.

    torch's caches hash torch's source for the same reason.
    """
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


_KEY = "torch_scan_hop"


def add_cache_key(body: fx.GraphModule) -> None:
    # torch 2.9 has no default dtype in its keys, though a body's torch.ones(2) has that
    body.meta[_KEY] = f"{_source()} {current_options()} {torch.get_default_dtype()}"


def has_cache_key(module: fx.GraphModule) -> bool:
    """Return True if ``module`` is the body of a scan."""
    return _KEY in module.meta
