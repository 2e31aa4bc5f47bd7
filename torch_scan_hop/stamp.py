"""What a compiled scan depends on besides its graph: part of the key in torch's caches.

torch hashes the attributes of graph modules along with their code, and keeps ``meta`` when it
copies one: each captured body carries the stamp there.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from torch import fx

from torch_scan_hop.rewrites.options import current_options

try:
    VERSION = version("torch_scan_hop")
except PackageNotFoundError:  # run from a source tree
    VERSION = "unknown"


def stamp(body: fx.GraphModule) -> None:
    body.meta["torch_scan_hop"] = f"{VERSION} {current_options()}"
