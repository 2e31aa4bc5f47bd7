"""Linear attention and DeltaNet: the state is a matrix of associations, written key by key."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_scan_hop import scan


def heads(x: Tensor, n: int) -> Tensor:
    """[B, T, D] -> [T, B, n, D / n], the commonest layout there is."""
    return x.view(*x.shape[:2], n, -1).permute(1, 0, 2, 3)


def with_scan(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """``q``, ``k``, ``v``: [B, T, D]; ``beta``: [B, T, heads]."""
    n = beta.shape[-1]
    qs, ks, vs = (heads(x, n) for x in (q, k, v))
    ks = F.normalize(ks, dim=-1)
    zeros = q.new_zeros(*ks.shape[1:], vs.shape[-1])

    def linear(s: Tensor, x: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        q, k, v = x
        s = s + k[..., :, None] * v[..., None, :]
        return s, torch.einsum("bhk,bhkv->bhv", q, s)

    def delta(s: Tensor, x: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        q, k, v, b = x
        error = v - torch.einsum("bhk,bhkv->bhv", k, s)  # what is stored under k, corrected
        s = s + k[..., :, None] * (b[..., None] * error)[..., None, :]
        return s, torch.einsum("bhk,bhkv->bhv", q, s)

    _, attended = scan(linear, zeros, (qs, ks, vs))
    _, corrected = scan(delta, zeros, (qs, ks, vs, torch.sigmoid(beta).transpose(0, 1)))
    return attended, corrected


def with_loop(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    n = beta.shape[-1]
    qs, ks, vs = (heads(x, n) for x in (q, k, v))
    ks, betas = F.normalize(ks, dim=-1), torch.sigmoid(beta).transpose(0, 1)
    weights = torch.einsum("tbhk,sbhk->bhts", qs, ks).tril()
    attended = torch.einsum("bhts,sbhv->tbhv", weights, vs)
    s, corrected = q.new_zeros(*ks.shape[1:], vs.shape[-1]), []
    for q_t, k_t, v_t, b_t in zip(qs, ks, vs, betas, strict=True):
        error = v_t - (k_t[..., None, :] @ s)[..., 0, :]
        s = s + k_t[..., :, None] @ (b_t[..., None] * error)[..., None, :]
        corrected.append((q_t[..., None, :] @ s)[..., 0, :])
    return attended, torch.stack(corrected)


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    B, T, D, n = 2, 12, 8, 2
    sizes = ((B, T, D), (B, T, D), (B, T, D), (B, T, n))
    return tuple(torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in sizes)


if __name__ == "__main__":
    import sys

    from compare import main

    main(sys.modules[__name__])
