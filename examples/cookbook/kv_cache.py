"""Decoding with a cache of keys and values: each token is chosen, and is the next one's input."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_scan_hop import scan


def attend(token: Tensor, t: Tensor, keys: Tensor, values: Tensor, w: dict[str, Tensor]) -> Tensor:
    q, k, v = (w["embed"][token] @ w["qkv"]).chunk(3, -1)
    keys[:, t], values[:, t] = k, v
    scores = torch.einsum("bd,bsd->bs", q, keys) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.arange(keys.shape[1]) > t, float("-inf"))
    context = torch.einsum("bs,bsd->bd", torch.softmax(scores, -1), values)
    return context @ w["out"]


def with_scan(first: Tensor, embed: Tensor, qkv: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    steps, w = 12, {"embed": embed, "qkv": qkv, "out": out}
    cache = embed.new_zeros(2, len(first), steps, embed.shape[1])

    def step(carry, _):
        token, t, keys, values = carry
        keys, values = keys.clone(), values.clone()
        logits = attend(token, t, keys, values, w)
        token = logits.argmax(-1)
        return (token, t + 1, keys, values), (token, logits)

    start = (first, torch.zeros((), dtype=torch.long), *cache)
    _, (tokens, logits) = scan(step, start, length=steps)
    return tokens, logits


def with_loop(first: Tensor, embed: Tensor, qkv: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    steps, token, tokens, found = 12, first, [], []
    q = k = v = torch.empty(0)
    past_k, past_v = [], []
    for _ in range(steps):
        q, k, v = (embed[token] @ qkv).chunk(3, -1)
        past_k.append(k)
        past_v.append(v)
        keys, values = torch.stack(past_k, 1), torch.stack(past_v, 1)
        weights = torch.softmax((keys @ q[..., None])[..., 0] / q.shape[-1] ** 0.5, -1)
        logits = (weights[:, None] @ values)[:, 0] @ out
        token = logits.argmax(-1)
        tokens.append(token)
        found.append(logits)
    return torch.stack(tokens), torch.stack(found)


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    V, D = 11, 6
    weights = (torch.randn(V, D), torch.randn(D, 3 * D), torch.randn(D, V))
    return torch.tensor([1, 5, 9]), *(w.double().requires_grad_() for w in weights)


if __name__ == "__main__":
    import sys

    from compare import main

    main(sys.modules[__name__])
