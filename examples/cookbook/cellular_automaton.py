"""Cellular automata: integers in the carry. Rule 110 on a ring, and Conway's game of life."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_scan_hop import scan


def with_scan(row: Tensor, board: Tensor) -> tuple[Tensor, Tensor]:
    """Histories of 40 generations: [40, cells] and [40, rows, columns]."""
    rule = torch.tensor([(110 >> k) & 1 for k in range(8)])

    def next_row(row: Tensor, _: None) -> tuple[Tensor, Tensor]:
        pattern = 4 * row.roll(1) + 2 * row + row.roll(-1)
        return rule[pattern], row

    def next_board(board: Tensor, _: None) -> tuple[Tensor, Tensor]:
        around = -board
        for dy in (-1, 0, 1):
            for dx in (-1, 0, 1):
                around = around + board.roll((dy, dx), (0, 1))
        alive = (around == 3) | ((around == 2) & (board == 1))
        return alive.to(board.dtype), board

    return scan(next_row, row, length=40)[1], scan(next_board, board, length=40)[1]


def with_loop(row: Tensor, board: Tensor) -> tuple[Tensor, Tensor]:
    rows, boards = [], []
    n, (height, width) = len(row), board.shape
    cells = row.tolist()
    for _ in range(40):
        rows.append(torch.tensor(cells))
        at = [4 * cells[k - 1] + 2 * cells[k] + cells[(k + 1) % n] for k in range(n)]
        cells = [(110 >> pattern) & 1 for pattern in at]
    alive = {(y, x) for y, x in board.nonzero().tolist()}
    for _ in range(40):
        grid = torch.zeros(height, width, dtype=board.dtype)
        for y, x in alive:
            grid[y, x] = 1
        boards.append(grid)
        counts: dict[tuple[int, int], int] = {}
        for y, x in alive:
            for dy in (-1, 0, 1):
                for dx in (-1, 0, 1):
                    if dy or dx:
                        place = ((y + dy) % height, (x + dx) % width)
                        counts[place] = counts.get(place, 0) + 1
        alive = {p for p, n in counts.items() if n == 3 or (n == 2 and p in alive)}
    return torch.stack(rows), torch.stack(boards)


def inputs() -> tuple[Tensor, ...]:
    row = torch.zeros(64, dtype=torch.long)
    row[-1] = 1
    board = torch.zeros(12, 12, dtype=torch.long)
    for y, x in ((0, 1), (1, 2), (2, 0), (2, 1), (2, 2)):  # a glider
        board[y, x] = 1
    return row, board


def picture(rows: Tensor) -> str:
    return "\n".join("".join(" #"[cell] for cell in row) for row in rows.tolist())


if __name__ == "__main__":
    import sys

    from compare import main

    main(sys.modules[__name__])
