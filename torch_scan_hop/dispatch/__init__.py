"""The implementations of ``scan`` for the dispatch keys: one file per key."""

from torch_scan_hop.dispatch import (  # noqa: F401  (each registers its kernel)
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
