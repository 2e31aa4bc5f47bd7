"""Workloads beyond those of ``speed.md``: small, complex, nested, with reductions and solves."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.workloads import FLOAT, Cell, Workload, recurrence
from tests.cells import Draw, Problem
from torch_scan_hop import scan


def advantage_of_step(advantage: Any, x: Any) -> tuple[Any, Any]:
    """Of torch's tensors or of jax's arrays."""
    advantage = x["delta"] + 0.95 * x["going"] * advantage
    return advantage, advantage


class GAE(Workload):
    """Generalised advantage estimation, backwards in time: a small scan, bound by its call."""

    name, T, reverse = "gae", 128, True
    lanes = 64

    def problem(self, T: int) -> Problem:
        draw = Draw(FLOAT)
        going = (torch.rand(T, self.lanes, generator=draw.generator) > 0.02).float()
        xs = {"delta": draw.normal(T, self.lanes), "going": going}
        return Problem(advantage_of_step, torch.zeros(self.lanes), xs, {})

    def jax_cell(self, jax: Any, p: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        return advantage_of_step(carry, x)


class ComplexLRU(Workload):
    """``h = a * h + x``, complex, as in LRU and S5."""

    name, T = "complex lru", 256
    B, N = 8, 128

    def problem(self, T: int) -> Problem:
        draw = Draw(FLOAT)
        angle, radius = draw.normal(self.N), 0.9 + 0.1 * torch.rand(self.N)
        a = torch.polar(radius, angle).requires_grad_()
        xs = torch.complex(draw.normal(T, self.B, self.N), draw.normal(T, self.B, self.N))
        init = torch.zeros(self.B, self.N, dtype=xs.dtype)
        return Problem(recurrence(a), init, xs, {"a": a})

    def jax_cell(self, jax: Any, p: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        return recurrence(p["a"])(carry, x)


class HiddenMarkov(Workload):
    """The forward algorithm over 32 states: a log-sum-exp per step."""

    name, T = "hmm", 256
    B, S = 16, 32

    def problem(self, T: int) -> Problem:
        draw = Draw(FLOAT)
        moves = draw.normal(self.S, self.S).log_softmax(-1).requires_grad_()

        def cell(alpha, seen):
            alpha = torch.logsumexp(alpha[:, :, None] + moves, dim=1) + seen
            return alpha, alpha

        return Problem(
            cell, draw.normal(self.B, self.S), draw.normal(T, self.B, self.S), {"m": moves}
        )

    def jax_cell(self, jax: Any, p: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        alpha = jax.nn.logsumexp(carry[:, :, None] + p["m"], axis=1) + x
        return alpha, alpha


class CachedAttention(Workload):
    """Attention of one query a step over a cache of keys and values, which the step writes."""

    name, T = "attention", 128
    B, S, D = 8, 128, 32

    def problem(self, T: int) -> Problem:
        draw = Draw(FLOAT)
        xs = {
            "at": F.one_hot(torch.arange(T) % self.S, self.S).float(),
            "k": draw.normal(T, self.B, self.D),
            "q": draw.normal(T, self.B, self.D),
            "v": draw.normal(T, self.B, self.D),
        }

        def cell(cache, x):
            keys, values = cache
            at = x["at"][:, None]  # [S, 1]: which row of the cache
            keys = keys * (1 - at) + at * x["k"][:, None]
            values = values * (1 - at) + at * x["v"][:, None]
            scores = torch.softmax(keys @ x["q"][..., None] * self.D**-0.5, 1)
            return (keys, values), (scores * values).sum(1)

        empty = torch.zeros(self.B, self.S, self.D)
        return Problem(cell, (empty, empty.clone()), xs, {})

    def jax_cell(self, jax: Any, p: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        keys, values = carry
        at = x["at"][:, None]  # [S, 1]: which row of the cache
        keys = keys * (1 - at) + at * x["k"][:, None]
        values = values * (1 - at) + at * x["v"][:, None]
        scores = jax.nn.softmax(keys @ x["q"][..., None] * self.D**-0.5, 1)
        return (keys, values), (scores * values).sum(1)


class Kalman(Workload):
    """A Kalman filter's covariance and mean of 4 states, batched: solves and products of 4 by 4."""

    name, T = "solve", 128
    B, N = 32, 4

    def problem(self, T: int) -> Problem:
        draw = Draw(FLOAT)
        moves = (torch.eye(self.N) + draw.normal(self.N, self.N, scale=0.1)).requires_grad_()
        eye = torch.eye(self.N)

        def cell(state, seen):
            mean, spread = state
            mean, spread = mean @ moves.mT, moves @ spread @ moves.mT + 0.1 * eye
            gain = torch.linalg.solve(spread + eye, spread)
            mean = mean + ((seen - mean)[:, None] @ gain)[:, 0]
            spread = spread - spread @ gain
            return (mean, spread), mean

        init = torch.zeros(self.B, self.N), eye.expand(self.B, self.N, self.N).contiguous()
        return Problem(cell, init, draw.normal(T, self.B, self.N), {"m": moves})

    def jax_cell(self, jax: Any, p: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        np, eye = jax.numpy, jax.numpy.eye(self.N)
        mean, spread = carry
        mean, spread = mean @ p["m"].T, p["m"] @ spread @ p["m"].T + 0.1 * eye
        gain = np.linalg.solve(spread + eye, spread)
        mean = mean + ((x - mean)[:, None] @ gain)[:, 0]
        spread = spread - spread @ gain
        return (mean, spread), mean


class Cholesky(Workload):
    """Rank-one updates of 4 by 4 matrices, each factored: a recursive least-squares step."""

    name, T = "cholesky", 128
    B, N = 32, 4

    def problem(self, T: int) -> Problem:
        draw = Draw(FLOAT)

        def cell(spread, x):
            spread = 0.95 * spread + x[:, :, None] * x[:, None]
            lower = torch.linalg.cholesky(spread)
            return spread, torch.linalg.solve_triangular(lower, x[..., None], upper=False)[..., 0]

        init = torch.eye(self.N).repeat(self.B, 1, 1)
        return Problem(cell, init, draw.normal(T, self.B, self.N), {})

    def jax_cell(self, jax: Any, p: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        spread = 0.95 * carry + x[:, :, None] * x[:, None]
        lower = jax.numpy.linalg.cholesky(spread)
        y = jax.scipy.linalg.solve_triangular(lower, x[..., None], lower=True)[..., 0]
        return spread, y


class KalmanOfEight(Workload):
    """A Kalman filter of 8 states of which 4 are observed, batched."""

    name, T = "kalman of 8", 256
    B, N, M = 16, 8, 4

    def problem(self, T: int) -> Problem:
        draw = Draw(FLOAT)
        moves = (0.9 * torch.eye(self.N) + draw.normal(self.N, self.N, scale=0.05)).requires_grad_()
        sees = draw.normal(self.M, self.N, scale=0.5).requires_grad_()
        eye, noise = torch.eye(self.N), 0.5 * torch.eye(self.M)

        def cell(state, seen):
            mean, spread = state
            mean, spread = mean @ moves.mT, moves @ spread @ moves.mT + 0.1 * eye
            crossed = sees @ spread
            gain = torch.linalg.solve(crossed @ sees.mT + noise, crossed).mT
            mean = mean + (gain @ (seen - mean @ sees.mT)[..., None])[..., 0]
            return (mean, (eye - gain @ sees) @ spread), mean

        init = torch.zeros(self.B, self.N), eye.expand(self.B, self.N, self.N).contiguous()
        return Problem(cell, init, draw.normal(T, self.B, self.M), {"moves": moves, "sees": sees})

    def jax_cell(self, jax: Any, p: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        np, moves, sees = jax.numpy, p["moves"], p["sees"]
        turned = lambda a: np.swapaxes(a, -1, -2)  # noqa: E731
        mean, spread = carry
        mean, spread = mean @ moves.T, moves @ spread @ moves.T + 0.1 * np.eye(self.N)
        crossed = sees @ spread
        gain = turned(np.linalg.solve(crossed @ sees.T + 0.5 * np.eye(self.M), crossed))
        mean = mean + (gain @ (x - mean @ sees.T)[..., None])[..., 0]
        return (mean, (np.eye(self.N) - gain @ sees) @ spread), mean


class LeastSquares(Workload):
    """Recursive least squares with 16 coefficients, batched: rank-one updates of 16 by 16."""

    name, T = "rls of 16", 256
    B, N = 16, 16

    def problem(self, T: int) -> Problem:
        draw = Draw(FLOAT)
        forgets = torch.tensor(0.98).requires_grad_()

        def cell(state, x):
            weights, inverse = state
            carried = (inverse @ x["in"][..., None])[..., 0]
            gain = carried / (forgets + (carried * x["in"]).sum(-1, keepdim=True))
            error = x["out"] - (weights * x["in"]).sum(-1)
            weights = weights + gain * error[..., None]
            inverse = (inverse - gain[..., None] * carried[..., None, :]) / forgets
            return (weights, inverse), error

        init = torch.zeros(self.B, self.N), torch.eye(self.N).repeat(self.B, 1, 1)
        xs = {"in": draw.normal(T, self.B, self.N), "out": draw.normal(T, self.B)}
        return Problem(cell, init, xs, {"forgets": forgets})

    def jax_cell(self, jax: Any, p: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        weights, inverse = carry
        carried = (inverse @ x["in"][..., None])[..., 0]
        gain = carried / (p["forgets"] + (carried * x["in"]).sum(-1, keepdims=True))
        error = x["out"] - (weights * x["in"]).sum(-1)
        inverse = (inverse - gain[..., None] * carried[..., None, :]) / p["forgets"]
        return (weights + gain * error[..., None], inverse), error


class Smoother(Workload):
    """A Kalman smoother (Rauch, Tung, Striebel) of 8 states, backwards over what a filter found."""

    name, T, reverse = "smoother", 256, True
    B, N = 16, 8

    def problem(self, T: int) -> Problem:
        draw = Draw(FLOAT)
        moves = (0.9 * torch.eye(self.N) + draw.normal(self.N, self.N, scale=0.05)).requires_grad_()
        eye = torch.eye(self.N)
        root = draw.normal(T, self.B, self.N, self.N, scale=0.3)
        xs = {"mean": draw.normal(T, self.B, self.N), "spread": root @ root.mT + 0.5 * eye}

        def cell(later, x):
            mean, spread = later
            foreseen = moves @ x["spread"] @ moves.mT + 0.1 * eye
            gain = torch.linalg.solve(foreseen, moves @ x["spread"]).mT
            error = mean - x["mean"] @ moves.mT
            mean = x["mean"] + (gain @ error[..., None])[..., 0]
            spread = x["spread"] + gain @ (spread - foreseen) @ gain.mT
            return (mean, spread), torch.cat([mean, spread.diagonal(0, -2, -1)], -1)

        init = torch.zeros(self.B, self.N), eye.expand(self.B, self.N, self.N).contiguous()
        return Problem(cell, init, xs, {"moves": moves})

    def jax_cell(self, jax: Any, p: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        np, moves = jax.numpy, p["moves"]
        turned = lambda a: np.swapaxes(a, -1, -2)  # noqa: E731
        mean, spread = carry
        foreseen = moves @ x["spread"] @ moves.T + 0.1 * np.eye(self.N)
        gain = turned(np.linalg.solve(foreseen, moves @ x["spread"]))
        error = mean - x["mean"] @ moves.T
        mean = x["mean"] + (gain @ error[..., None])[..., 0]
        spread = x["spread"] + gain @ (spread - foreseen) @ turned(gain)
        return (mean, spread), np.concatenate([mean, np.diagonal(spread, 0, -2, -1)], -1)


class ExtendedKalman(Workload):
    """An extended Kalman filter of a turning vehicle (5 states), seen by range and bearing."""

    name, T = "ekf", 256
    B, N = 16, 5

    def problem(self, T: int) -> Problem:
        draw = Draw(FLOAT)
        noise = torch.tensor([0.1, 0.1, 0.05, 0.1, 0.02]).requires_grad_()
        eye = torch.eye(self.N)

        def move(state):
            x, y, heading, speed, turn = state.unbind(-1)
            moved = (x + 0.1 * speed * torch.cos(heading), y + 0.1 * speed * torch.sin(heading))
            return torch.stack([*moved, heading + 0.1 * turn, speed, turn])

        def look(state):
            x, y = state[0] - 20, state[1] - 20
            return torch.stack([torch.sqrt(x * x + y * y), torch.atan2(y, x)])

        def one(mean, spread, seen):
            slope = torch.func.jacrev(move)(mean)
            mean, spread = move(mean), slope @ spread @ slope.mT + torch.diag(noise)
            sees = torch.func.jacrev(look)(mean)
            crossed = sees @ spread
            gain = torch.linalg.solve(crossed @ sees.mT + 0.5 * torch.eye(2), crossed).mT
            return mean + gain @ (seen - look(mean)), (eye - gain @ sees) @ spread

        def cell(state, seen):
            mean, spread = torch.func.vmap(one)(*state, seen)
            return (mean, spread), mean

        init = torch.zeros(self.B, self.N), eye.expand(self.B, self.N, self.N).contiguous()
        seen = torch.tensor([28.0, -2.3]) + draw.normal(T, self.B, 2, scale=0.1)
        return Problem(cell, init, seen, {"noise": noise})

    def jax_cell(self, jax: Any, p: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        np = jax.numpy

        def move(state: Any) -> Any:
            x, y, heading, speed, turn = state
            moved = (x + 0.1 * speed * np.cos(heading), y + 0.1 * speed * np.sin(heading))
            return np.stack([*moved, heading + 0.1 * turn, speed, turn])

        def look(state: Any) -> Any:
            x, y = state[0] - 20, state[1] - 20
            return np.stack([np.sqrt(x * x + y * y), np.arctan2(y, x)])

        def one(mean: Any, spread: Any, seen: Any) -> tuple[Any, Any]:
            slope = jax.jacrev(move)(mean)
            mean, spread = move(mean), slope @ spread @ slope.T + np.diag(p["noise"])
            sees = jax.jacrev(look)(mean)
            crossed = sees @ spread
            gain = np.linalg.solve(crossed @ sees.T + 0.5 * np.eye(2), crossed).T
            return mean + gain @ (seen - look(mean)), (np.eye(self.N) - gain @ sees) @ spread

        mean, spread = jax.vmap(one)(*carry, x)
        return (mean, spread), mean


class GaussianMarkov(Workload):
    """The forward algorithm over 8 states that emit 4 numbers, by normals of full covariance."""

    name, T = "gaussian hmm", 256
    B, S, M = 16, 8, 4

    def problem(self, T: int) -> Problem:
        draw = Draw(FLOAT)
        params = {
            "means": draw.normal(self.S, self.M).requires_grad_(),
            "moves": draw.normal(self.S, self.S).requires_grad_(),
            "roots": draw.normal(self.S, self.M, self.M, scale=0.2).requires_grad_(),
        }

        def cell(alpha, seen):
            spread = params["roots"] @ params["roots"].mT + torch.eye(self.M)
            lower = torch.linalg.cholesky(spread)
            off = (seen[:, None] - params["means"])[..., None]  # [B, S, M, 1]
            scaled = torch.linalg.solve_triangular(lower, off, upper=False)[..., 0]
            logs = -0.5 * (scaled**2).sum(-1) - lower.diagonal(0, -2, -1).log().sum(-1)
            moves = params["moves"].log_softmax(-1)
            alpha = torch.logsumexp(alpha[:, :, None] + moves, dim=1) + logs
            return alpha, alpha

        return Problem(cell, draw.normal(self.B, self.S), draw.normal(T, self.B, self.M), params)

    def jax_cell(self, jax: Any, p: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        np = jax.numpy
        spread = p["roots"] @ np.swapaxes(p["roots"], -1, -2) + np.eye(self.M)
        lower = np.linalg.cholesky(spread)
        off = (x[:, None] - p["means"])[..., None]
        lowers = np.broadcast_to(lower, (*off.shape[:-2], self.M, self.M))
        scaled = jax.scipy.linalg.solve_triangular(lowers, off, lower=True)[..., 0]
        logs = -0.5 * (scaled**2).sum(-1) - np.log(np.diagonal(lower, 0, -2, -1)).sum(-1)
        moves = jax.nn.log_softmax(p["moves"], axis=-1)
        alpha = jax.nn.logsumexp(carry[:, :, None] + moves, axis=1) + logs
        return alpha, alpha


class Determinant(Workload):
    """The volume of a flow: determinants of 8 by 8 matrices near the identity."""

    name, T = "determinant", 256
    B, N = 16, 8

    def problem(self, T: int) -> Problem:
        draw = Draw(FLOAT)
        weights = draw.normal(self.N, self.N, scale=0.1).requires_grad_()
        eye = torch.eye(self.N)

        def cell(h, x):
            slope = eye + torch.tanh(h)[..., None] * weights
            return torch.tanh(h @ weights + x), torch.linalg.det(slope)

        return Problem(
            cell, torch.zeros(self.B, self.N), draw.normal(T, self.B, self.N), {"w": weights}
        )

    def jax_cell(self, jax: Any, p: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        np = jax.numpy
        slope = np.eye(self.N) + np.tanh(carry)[..., None] * p["w"]
        return np.tanh(carry @ p["w"] + x), np.linalg.det(slope)


class TimeByLayers(Workload):
    """An RNN of four layers: a scan over layers in the body of a scan over time."""

    name, T = "time x layers", 64
    B, H, L = 8, 64, 4

    def problem(self, T: int) -> Problem:
        draw = Draw(FLOAT)
        weights = draw.normal(self.L, self.H, self.H, scale=self.H**-0.5).requires_grad_()

        def layer(x, above):
            h, w = above
            h = torch.tanh(h @ w + x)
            return h, h

        def cell(hs, x):
            y, hs = scan(layer, x, (hs, weights))
            return hs, y

        init = torch.zeros(self.L, self.B, self.H)
        return Problem(cell, init, draw.normal(T, self.B, self.H), {"w": weights})

    def loop_cell(self, problem: Problem) -> Cell:
        def cell(hs, x):
            found = []
            for h, w in zip(hs.unbind(0), problem.params["w"].unbind(0), strict=True):
                x = torch.tanh(h @ w + x)
                found.append(x)
            return torch.stack(found), x

        return cell

    def jax_cell(self, jax: Any, p: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        def layer(x: Any, above: Any) -> Any:
            h, w = above
            h = jax.numpy.tanh(h @ w + x)
            return h, h

        y, hs = jax.lax.scan(layer, x, (carry, p["w"]))
        return hs, y


class TransformerLayers(Workload):
    """Twelve pre-norm transformer blocks, whose weights are xs."""

    name, T = "transformer layers", 12
    B, S, D = 4, 32, 256

    def problem(self, T: int) -> Problem:
        draw, D = Draw(FLOAT), self.D
        xs = {
            "down": draw.normal(T, 2 * D, D, scale=D**-0.5),
            "out": draw.normal(T, D, D, scale=D**-0.5),
            "qkv": draw.normal(T, D, 3 * D, scale=D**-0.5),
            "up": draw.normal(T, D, 2 * D, scale=D**-0.5),
        }

        def cell(h, p):
            q, k, v = (F.layer_norm(h, (D,)) @ p["qkv"]).chunk(3, -1)
            h = h + torch.softmax(q @ k.mT * D**-0.5, -1) @ v @ p["out"]
            return h + torch.relu(F.layer_norm(h, (D,)) @ p["up"]) @ p["down"], None

        return Problem(cell, draw.normal(self.B, self.S, D), xs, {})

    def jax_cell(self, jax: Any, p: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        np = jax.numpy

        def norm(h: Any) -> Any:
            mean = h.mean(-1, keepdims=True)
            return (h - mean) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)

        q, k, v = np.split(norm(carry) @ x["qkv"], 3, -1)
        scores = jax.nn.softmax(q @ k.swapaxes(-1, -2) * self.D**-0.5, -1)
        h = carry + scores @ v @ x["out"]
        return h + jax.nn.relu(norm(h) @ x["up"]) @ x["down"], None


BODIES: dict[str, Workload] = {
    w.name: w
    for w in (
        GAE(),
        ComplexLRU(),
        HiddenMarkov(),
        CachedAttention(),
        Kalman(),
        Cholesky(),
        KalmanOfEight(),
        LeastSquares(),
        Smoother(),
        ExtendedKalman(),
        GaussianMarkov(),
        Determinant(),
        TimeByLayers(),
        TransformerLayers(),
    )
}
