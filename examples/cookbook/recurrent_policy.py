"""A recurrent policy over many episodes in one batch: the state is reset where one begins."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_scan_hop import scan

cell = nn.GRUCell(3, 6).double()
head = nn.Linear(6, 4).double()


def with_scan(observations: Tensor, begins: Tensor, actions: Tensor, h: Tensor) -> Tensor:
    """Log-probabilities of what was done: [T, B]."""

    def step(h: Tensor, x: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        observation, begins, action = x
        h = h.clone()
        h[begins] = 0.0
        h = cell(observation, h)
        policy = torch.distributions.Categorical(logits=head(h), validate_args=False)
        return h, policy.log_prob(action)

    return scan(step, h, (observations, begins, actions))[1]


def with_loop(observations: Tensor, begins: Tensor, actions: Tensor, h: Tensor) -> Tensor:
    found = []
    for observation, new, action in zip(observations, begins, actions, strict=True):
        h = cell(observation, torch.where(new[:, None], 0.0, h))
        found.append(torch.log_softmax(head(h), -1).gather(-1, action[:, None])[:, 0])
    return torch.stack(found)


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    T, B = 20, 5
    return (
        torch.randn(T, B, 3, dtype=torch.float64, requires_grad=True),
        torch.rand(T, B) < 0.2,
        torch.randint(4, (T, B)),
        torch.randn(B, 6, dtype=torch.float64, requires_grad=True),
    )


if __name__ == "__main__":
    import sys

    from compare import main

    main(sys.modules[__name__])
