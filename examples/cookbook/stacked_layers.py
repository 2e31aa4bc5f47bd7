"""A stack of equal layers as one scan: 6 transformer blocks compile as one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_scan_hop import scan_layers

layers = nn.ModuleList(
    nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    for _ in range(6)
).double()


def with_scan(x: Tensor) -> Tensor:
    return scan_layers(layers, x)


def with_loop(x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return (torch.randn(2, 7, 8, dtype=torch.float64, requires_grad=True),)


if __name__ == "__main__":
    import sys

    from compare import main

    main(sys.modules[__name__])
