"""A policy with a memory, trained by PPO: at the end of a corridor it must know where to turn.

    python examples/policy.py       # trains, draws policy.png if matplotlib is there

A T-maze: at the start a sign says left or right, then comes a corridor of 4 to 8 steps where there
is no sign, and the turn at its end is rewarded with 1 if it is the right one. An agent without a
memory gets 0.5. Three scans: the world and the policy side by side, the advantages backwards in
time (GAE), and the policy over what was seen, with gradients.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_scan_hop import scan

STEPS, ENVS, HIDDEN = 32, 64, 32
GAMMA, LAMBDA, CLIP = 0.97, 0.9, 0.2
GOAL = 0.95  # of the turns are right


class World(NamedTuple):
    """Of each environment: what the sign says, how far the end is, whether it has just begun."""

    sign: Tensor
    ahead: Tensor
    begins: Tensor

    @staticmethod
    def new(n: int) -> World:
        begins = torch.ones(n, dtype=torch.bool)
        return World(torch.randint(2, (n,)), torch.randint(4, 9, (n,)), begins)

    def seen(self) -> Tensor:
        """``[B, 3]``: the sign, 1 or -1, while it is there; the end; and a one."""
        sign = torch.where(self.begins, self.sign * 2 - 1, 0)
        return torch.stack([sign, self.ahead == 0, torch.ones_like(sign)], -1).float()

    def after(self, action: Tensor) -> tuple[World, Tensor, Tensor]:
        """The next one, the reward, and whether the episode has ended: another begins then."""
        ends = self.ahead == 0
        reward = (ends & (action == self.sign)).float()
        on, new = World(self.sign, self.ahead - 1, torch.zeros_like(ends)), World.new(len(ends))
        return World(*(torch.where(ends, b, a) for a, b in zip(on, new, strict=True))), reward, ends


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, HIDDEN)
        self.actor, self.critic = nn.Linear(HIDDEN, 2), nn.Linear(HIDDEN, 1)

    def step(self, h: Tensor, seen: Tensor, begins: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The next state, logits and value; an episode that begins knows nothing of the last."""
        h = self.cell(seen, torch.where(begins[:, None], 0.0, h))
        return h, F.log_softmax(self.actor(h), -1), self.critic(h)[:, 0]


class Played(NamedTuple):
    """What happened, step by step: each ``[T, B, ...]``."""

    seen: Tensor
    begins: Tensor
    actions: Tensor
    logits: Tensor
    values: Tensor
    rewards: Tensor
    ends: Tensor


@torch.no_grad()
def play(policy: Policy, world: World, h: Tensor) -> tuple[tuple[World, Tensor], Played]:
    def step(state, _):
        world, h = state
        seen = world.seen()
        h, logits, value = policy.step(h, seen, world.begins)
        action = torch.multinomial(logits.exp(), 1)[:, 0]
        after, reward, ends = world.after(action)
        return (after, h), Played(seen, world.begins, action, logits, value, reward, ends)

    return scan(step, (world, h), length=STEPS)


def advantages(played: Played, last: Tensor) -> Tensor:
    """GAE: the sum of what was better than foreseen, and less so the later it was."""
    alive = GAMMA * (~played.ends).float()
    foreseen = torch.cat([played.values[1:], last[None]])
    errors = played.rewards + alive * foreseen - played.values

    def step(ahead, x):
        error, alive = x
        ahead = error + LAMBDA * alive * ahead
        return ahead, ahead

    return scan(step, torch.zeros_like(last), (errors, alive), reverse=True)[1]


def loss(policy: Policy, h: Tensor, played: Played, gained: Tensor) -> Tensor:
    """PPO's, of the policy run over all steps again."""

    def step(h, x):
        h, logits, value = policy.step(h, *x)
        return h, (logits, value)

    _, (logits, values) = scan(step, h, (played.seen, played.begins))
    of_actions = (logits - played.logits).gather(-1, played.actions[..., None])[..., 0]
    ratio, better = of_actions.exp(), (gained - gained.mean()) / (gained.std() + 1e-6)
    of_policy = torch.minimum(ratio * better, ratio.clamp(1 - CLIP, 1 + CLIP) * better)
    entropy = -(logits.exp() * logits).sum(-1)
    of_values = (values - (played.values + gained)).square()
    return (0.5 * of_values - of_policy - 0.01 * entropy).mean()


def train(policy: Policy, rounds: int) -> list[float]:
    """Which part of the turns is right, in each round; until GOAL is passed ten times."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    world, h = World.new(ENVS), torch.zeros(ENVS, HIDDEN)
    found: list[float] = []
    for _ in range(rounds):
        begin = h
        (world, h), played = play(policy, world, h)
        with torch.no_grad():
            last = policy.step(h, world.seen(), world.begins)[2]
            gained = advantages(played, last)
        for _ in range(4):
            optimizer.zero_grad()
            loss(policy, begin, played, gained).backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
        found.append((played.rewards.sum() / played.ends.sum()).item())
        if min(found[-10:]) > GOAL and len(found) >= 10:
            break
    return found


def draw(curve: list[float], path: str) -> None:
    try:
        from matplotlib import pyplot
    except ImportError:
        return
    _, axes = pyplot.subplots()
    axes.plot(curve)
    axes.set(xlabel="round", ylabel="right turns", ylim=(0, 1))
    pyplot.savefig(path)
    print(f"drawn: {path}")


def main() -> None:
    torch.set_num_threads(1)  # a step's products are small
    torch.manual_seed(0)
    policy, start = Policy(), time.perf_counter()
    curve = train(policy, 300)
    seconds = time.perf_counter() - start
    score = sum(curve[-10:]) / 10
    print(f"{score:.3f} of the turns are right, after {len(curve)} rounds and {seconds:.0f} s")
    assert score >= GOAL, f"expected {GOAL}"
    draw(curve, "policy.png")


if __name__ == "__main__":
    main()
