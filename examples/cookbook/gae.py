"""Advantages from rewards, backwards in time: GAE, and V-trace with its clipped ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_scan_hop import scan

GAMMA, LAMBDA = 0.99, 0.95


def with_scan(
    rewards: Tensor, values: Tensor, last: Tensor, done: Tensor, log_ratios: Tensor
) -> tuple[Tensor, Tensor]:
    """``rewards``, ``values``, ``done``, ``log_ratios``: [T, B]; ``last``: [B]."""
    following = torch.cat([values[1:], last[None]])
    alive = GAMMA * (~done).to(rewards.dtype)
    errors = rewards + alive * following - values

    def gae(advantage: Tensor, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        error, alive = x
        advantage = error + LAMBDA * alive * advantage
        return advantage, advantage

    def vtrace(ahead: Tensor, x: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        error, alive, log_ratio = x
        rho = torch.exp(log_ratio).clamp(max=1.0)
        ahead = rho * error + alive * rho * ahead
        return ahead, ahead

    _, advantages = scan(gae, torch.zeros_like(last), (errors, alive), reverse=True)
    _, above = scan(vtrace, torch.zeros_like(last), (errors, alive, log_ratios), reverse=True)
    return advantages, values + above


def with_loop(
    rewards: Tensor, values: Tensor, last: Tensor, done: Tensor, log_ratios: Tensor
) -> tuple[Tensor, Tensor]:
    advantage = ahead = torch.zeros_like(last)
    advantages, targets = [], []
    value_after = last
    for t in reversed(range(len(rewards))):
        alive = GAMMA * (~done[t]).to(rewards.dtype)
        error = rewards[t] + alive * value_after - values[t]
        advantage = error + LAMBDA * alive * advantage
        rho = log_ratios[t].exp().clamp(max=1.0)
        ahead = rho * error + alive * rho * ahead
        advantages.insert(0, advantage)
        targets.insert(0, values[t] + ahead)
        value_after = values[t]
    return torch.stack(advantages), torch.stack(targets)


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    T, B = 50, 3
    rewards, values, log_ratios = torch.randn(3, T, B, dtype=torch.float64).unbind(0)
    done = torch.rand(T, B) < 0.1
    last = torch.randn(B, dtype=torch.float64, requires_grad=True)
    return rewards, values.clone().requires_grad_(), last, done, log_ratios.clone().requires_grad_()


if __name__ == "__main__":
    import sys

    from compare import main

    main(sys.modules[__name__])
