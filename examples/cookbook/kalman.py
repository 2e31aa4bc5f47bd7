"""A Kalman filter and smoother: one scan forwards, one backwards, with linear algebra in both."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_scan_hop import scan


def predict(mean: Tensor, cov: Tensor, a: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    return mean @ a.T, a @ cov @ a.T + q


def update(mean: Tensor, cov: Tensor, y: Tensor, c: Tensor, r: Tensor):
    """The filtered state, and the log-likelihood of ``y``."""
    s = c @ cov @ c.T + r
    gain = torch.linalg.solve(s, c @ cov).mT
    error = y - mean @ c.T
    chol = torch.linalg.cholesky(s)
    log_likelihood = torch.distributions.MultivariateNormal(
        torch.zeros_like(error), scale_tril=chol, validate_args=False
    ).log_prob(error)
    return mean + (gain @ error[..., None])[..., 0], cov - gain @ c @ cov, log_likelihood


def smooth(ahead: tuple[Tensor, Tensor], here: tuple[Tensor, Tensor], a: Tensor, q: Tensor):
    (next_mean, next_cov), (mean, cov) = ahead, here
    predicted_mean, predicted_cov = predict(mean, cov, a, q)
    gain = torch.linalg.solve(predicted_cov, a @ cov).mT
    mean = mean + (gain @ (next_mean - predicted_mean)[..., None])[..., 0]
    return mean, cov + gain @ (next_cov - predicted_cov) @ gain.mT


def with_scan(ys: Tensor, a: Tensor, c: Tensor, q: Tensor, r: Tensor):
    q, r = q @ q.T + torch.eye(len(q), dtype=q.dtype), r @ r.T + torch.eye(len(r), dtype=r.dtype)

    def forward(state: tuple[Tensor, Tensor], y: Tensor):
        mean, cov, log_likelihood = update(*predict(*state, a, q), y, c, r)
        return (mean, cov), (mean, cov, log_likelihood)

    def backward(ahead: tuple[Tensor, Tensor], here: tuple[Tensor, Tensor]):
        found = smooth(ahead, here, a, q)
        return found, found

    start = (ys.new_zeros(ys.shape[1], len(a)), torch.eye(len(a), dtype=ys.dtype))
    last, (means, covs, log_likelihoods) = scan(forward, start, ys)
    start_back = (last[0], last[1])
    _, smoothed = scan(backward, start_back, (means[:-1], covs[:-1]), reverse=True)
    return log_likelihoods.sum(0), smoothed


def with_loop(ys: Tensor, a: Tensor, c: Tensor, q: Tensor, r: Tensor):
    q, r = q @ q.T + torch.eye(len(q), dtype=q.dtype), r @ r.T + torch.eye(len(r), dtype=r.dtype)
    state = (ys.new_zeros(ys.shape[1], len(a)), torch.eye(len(a), dtype=ys.dtype))
    filtered, total = [], torch.zeros(ys.shape[1], dtype=ys.dtype)
    for y in ys:
        mean, cov, log_likelihood = update(*predict(*state, a, q), y, c, r)
        state, total = (mean, cov), total + log_likelihood
        filtered.append(state)
    smoothed = []
    for here in reversed(filtered[:-1]):
        state = smooth(state, here, a, q)
        smoothed.insert(0, state)
    means, covs = zip(*smoothed, strict=True)
    return total, (torch.stack(means), torch.stack(covs))


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    T, B, S, D = 12, 2, 3, 2
    ys = torch.randn(T, B, D, dtype=torch.float64)
    weights = (torch.randn(S, S) / 3, torch.randn(D, S), torch.randn(S, S), torch.randn(D, D))
    return ys.requires_grad_(), *(w.double().requires_grad_() for w in weights)


if __name__ == "__main__":
    import sys

    from compare import main

    main(sys.modules[__name__])
