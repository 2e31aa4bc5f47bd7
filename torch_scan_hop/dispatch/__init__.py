"""The implementations of ``scan`` for the dispatch keys: one file per key."""

from torch_scan_hop.dispatch import (
    autocast,
    autograd,
    dense,
    dtensor,
    fake,
    functionalize,
    grad,
    jvp,
    lazy_views,
    meta,
    proxy,
    vmap,
    xla,
)

__all__ = [
    "autocast",
    "autograd",
    "dense",
    "dtensor",
    "fake",
    "functionalize",
    "grad",
    "jvp",
    "lazy_views",
    "meta",
    "proxy",
    "vmap",
    "xla",
]
