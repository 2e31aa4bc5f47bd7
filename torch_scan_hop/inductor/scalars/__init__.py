"""Small matrices written out as scalars (scalar replacement of aggregates).

A Kalman filter multiplies, solves and factors matrices of four rows, for each element of a batch:
some ten operators a step, each of which costs a call and does next to nothing. Written out, with
one value for each entry of a matrix, a step is pointwise in the batch, and the whole scan is one
kernel::

    before: (spread [B, 2, 2], x [B, 2])  -> (0.95 * spread + x x^T, solve(spread, x))
    after:  (s00 [B], s01, s10, s11, x0, x1) -> (0.95 * s00 + x0 * x0, ..., y0, y1)

- ``entries``: a tensor as its entries, and where the lanes (the batch) are in its shape
- ``moves``: operators that only move entries, which torch does; ``arithmetic``: pointwise ones,
  sums, products; ``linalg``: factorisations, and solves with their factors
- ``interpreter``: runs a body on entries; ``rewrite``: a scan as one of its entries
"""
