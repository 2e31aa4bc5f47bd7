"""Stretches of consecutive steps: take their xs out of all xs, and put their ys together again."""

from __future__ import annotations

from typing import Any

import torch

from torch_scan_hop import tree


def in_segments(xs: Any, length: int) -> Any:
    return tree.map_leaves(lambda x: x.reshape(x.shape[0] // length, length, *x.shape[1:]), xs)


def flat(ys: Any) -> Any:
    return tree.map_leaves(lambda y: y.flatten(0, 1), ys)


def joined_ys(parts: list[Any], reverse: bool) -> Any:
    """Join the ys of consecutive stretches, in the order of xs."""
    ordered = parts[::-1] if reverse else parts
    leaves = [tree.tensors(part) for part in ordered]
    joined = [torch.cat(list(group)) for group in zip(*leaves, strict=True)]
    return tree.unflatten(ordered[0], joined)
