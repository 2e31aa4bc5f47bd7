"""A world model (RSSM): a deterministic and a stochastic state, KL of posterior and prior."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from torch_scan_hop import scan

D, S, A, E = 6, 3, 2, 4  # deterministic, stochastic, action, embedding
gru = nn.GRUCell(S + A, D).double()
prior_net, posterior_net = nn.Linear(D, 2 * S).double(), nn.Linear(D + E, 2 * S).double()


def normal(parameters: Tensor) -> Normal:
    mean, scale = parameters.chunk(2, -1)
    return Normal(mean, nn.functional.softplus(scale) + 0.1, validate_args=False)


def step(state: dict[str, Tensor], action: Tensor, seen: Tensor, noise: Tensor):
    deter = gru(torch.cat([state["stoch"], action], -1), state["deter"])
    prior, posterior = normal(prior_net(deter)), normal(posterior_net(torch.cat([deter, seen], -1)))
    stoch = posterior.mean + posterior.stddev * noise
    kl = kl_divergence(posterior, prior).sum(-1)
    return {"deter": deter, "stoch": stoch}, kl


def with_scan(actions: Tensor, embeddings: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    def body(state, x):
        state, kl = step(state, *x)
        return state, (torch.cat([state["deter"], state["stoch"]], -1), kl)

    B = actions.shape[1]
    start = {"deter": actions.new_zeros(B, D), "stoch": actions.new_zeros(B, S)}
    return scan(body, start, (actions, embeddings, noise))[1]


def with_loop(actions: Tensor, embeddings: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    B = actions.shape[1]
    state = {"deter": actions.new_zeros(B, D), "stoch": actions.new_zeros(B, S)}
    features, kls = [], []
    for x in zip(actions, embeddings, noise, strict=True):
        state, kl = step(state, *x)
        features.append(torch.cat([state["deter"], state["stoch"]], -1))
        kls.append(kl)
    return torch.stack(features), torch.stack(kls)


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    T, B = 15, 3
    sizes = ((T, B, A), (T, B, E), (T, B, S))
    return tuple(torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in sizes)


if __name__ == "__main__":
    import sys

    from compare import main

    main(sys.modules[__name__])
