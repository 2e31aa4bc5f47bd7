"""The CTC loss as a scan over frames, against torch's own: labels between blanks, in log space."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_scan_hop import scan

NEVER = -1e5  # a log-probability that is zero, whose gradient is no nan


def with_scan(logits: Tensor, labels: Tensor) -> Tensor:
    """``logits``: [T, B, V], blank 0; ``labels``: [B, L]. Returns each sequence's loss, [B]."""
    B, L = labels.shape
    extended = labels.new_zeros(B, 2 * L + 1)
    extended[:, 1::2] = labels  # blank, a, blank, b, ..., blank
    # from a label one may come past the blank before it, if the label before that is another
    skips = torch.zeros_like(extended, dtype=torch.bool)
    skips[:, 2:] = (extended[:, 2:] != 0) & (extended[:, 2:] != extended[:, :-2])
    log_probs = torch.log_softmax(logits, -1)

    def step(alpha: Tensor, frame: Tensor) -> tuple[Tensor, None]:
        one = F.pad(alpha, (1, 0), value=NEVER)[:, :-1]
        two = F.pad(alpha, (2, 0), value=NEVER)[:, :-2]
        two = torch.where(skips, two, NEVER)
        reached = torch.logsumexp(torch.stack([alpha, one, two]), 0)
        return reached + frame.gather(1, extended), None

    start = torch.full_like(log_probs[0, :, :1], NEVER).expand(B, 2 * L + 1).clone()
    start[:, :2] = log_probs[0].gather(1, extended[:, :2])
    alpha, _ = scan(step, start, log_probs[1:])
    return -torch.logsumexp(alpha[:, -2:], 1)


def with_loop(logits: Tensor, labels: Tensor) -> Tensor:
    T, B, _ = logits.shape
    lengths = torch.full((B,), T), torch.full((B,), labels.shape[1])
    return F.ctc_loss(torch.log_softmax(logits, -1), labels, *lengths, reduction="none")


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    T, B, V = 16, 3, 5
    labels = torch.tensor([[1, 2, 2, 3], [4, 4, 1, 2], [3, 1, 3, 1]])
    return torch.randn(T, B, V, dtype=torch.float64, requires_grad=True), labels


if __name__ == "__main__":
    import sys

    from compare import main

    main(sys.modules[__name__])
