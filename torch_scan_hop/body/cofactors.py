"""The gradient of a determinant, as one operator.

It is made of LU factors where nothing differentiates it, as it is in torch. Where it is
differentiated again, it takes the formulas for regular and for singular matrices, each for its own.
In a graph it is one operator, so that it still has that choice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_scan_hop._torch.operators import below_autograd
from torch_scan_hop._torch.transforms import unpack_dual
from torch_scan_hop.body.own_operators import own_operator

aten = torch.ops.aten


def sign_of_exchanges(pivots: Tensor, like: Tensor) -> Tensor:
    """Return 1 or -1 for an even or odd number of exchanges of rows, as LU factors have them."""
    rows = torch.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype, device=pivots.device)
    return (1 - 2 * (pivots != rows).to(like.dtype)).prod(-1)


def cofactors_by_factors(matrix: Tensor) -> Tensor:
    """Return ``det(A)^* A^-H``, of LU factors in which tiny numbers stand for zeros.

    So it is right for a singular matrix, too, whose determinant has a gradient if no more than one
    singular value is zero. (torch's own is zero there: it multiplies by the zero determinant.)
    """
    factors, pivots, _ = aten.linalg_lu_factor_ex.default(matrix.mH)
    diagonal = factors.diagonal(0, -2, -1)
    tiny = torch.where(diagonal == 0, torch.finfo(matrix.dtype).eps, 0.0).to(matrix.dtype)
    determinant = (diagonal + tiny).prod(-1) * sign_of_exchanges(pivots, matrix)
    sides = determinant.unsqueeze(-1).expand(matrix.shape[:-1]).diag_embed()
    return aten.linalg_lu_solve.default(factors + tiny.diag_embed(), pivots, sides)


def _of_any_order(matrix: Tensor) -> Tensor:
    """Compute ``cofactors`` by formulas whose derivatives are right, for any matrix.

    As in torch's ``linalg_det_backward``: ``det(A)^* A^-H``, and of a singular matrix by its
    singular vectors ``U S V^H``: ``U diag(products of the others of S) V^H (det(U) det(V^H))^*``.
    """
    n = matrix.shape[-1]
    det = torch.linalg.det(matrix)
    is_singular = (det.abs() < 100 * torch.finfo(matrix.dtype).eps)[..., None, None]
    ones = torch.ones(n, dtype=matrix.dtype, device=matrix.device)
    regular = torch.where(is_singular, torch.diag(ones), matrix)
    by_inverse = det.conj()[..., None, None] * torch.linalg.inv(regular.mH)
    # with singular values that all differ where this formula is not asked for
    singular = torch.where(is_singular, matrix, torch.diag(ones.cumsum(0)))
    left, values, right = torch.linalg.svd(singular)
    phase = (torch.linalg.slogdet(left)[0] * torch.linalg.slogdet(right)[0]).conj()
    others = _products_of_others(values).to(matrix.dtype) * phase[..., None]
    return torch.where(is_singular, (left * others[..., None, :]) @ right, by_inverse)


def _products_of_others(values: Tensor) -> Tensor:
    """Return for each value of the last dimension the product of all the others, of any order."""
    n = values.shape[-1]
    rows = values[..., None, :].expand(*values.shape, n)
    eye = torch.eye(n, dtype=torch.bool, device=values.device)
    return torch.where(eye, 1.0, rows).prod(-1)


def _under_autograd(matrix: Tensor) -> Tensor:
    primal, tangent = unpack_dual(matrix)
    if tangent is not None or (primal.requires_grad and torch.is_grad_enabled()):
        return _of_any_order(matrix)
    with below_autograd():
        return cofactors(matrix)


cofactors = own_operator(
    "cofactors(Tensor matrix) -> Tensor",
    {"CompositeExplicitAutograd": cofactors_by_factors, "Autograd": _under_autograd},
)


@torch.library.register_vmap("torch_scan_hop::cofactors")
def _of_many(info: Any, in_dims: Any, matrix: Tensor) -> tuple[Tensor, int]:
    return cofactors(matrix.movedim(in_dims[0], 0)), 0
