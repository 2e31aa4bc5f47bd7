"""Indexing by 0-d tensors on XLA: one While, and no value comes to the host."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torch_xla")

from xla_harness import DeviceWork, check, count_of

import torch_scan_hop

pytestmark = pytest.mark.xla


def decoder(given):
    table, w = given.randn(6, 4, grad=True), given.randn(4, 4, grad=True)
    cache = given.randn(3, 4, 5, grad=True)

    def body(carry, token):
        h, K, i = carry
        K = K.clone()
        K[:, :, i] = torch.tanh(h @ w)
        K[1, 2, i] += table[token, -1]
        near = K.narrow(2, i % 4, 2).sum((0, 2)) + K[..., i - 1].sum(0)
        h = torch.tanh(table[token] + near * K.select(2, i)[0])
        return (h, K, i + 1), (h, K[0, :, i : i + 1])

    tokens = given.tensor(torch.tensor([3, 0, 3, 5, 1]))
    init = (given.randn(4, grad=True), cache, given.tensor(torch.tensor(0)))
    return given.scan(body, init, tokens)


def views(given):
    def body(c, i):
        c = c.clone()
        row = c[i]
        row.mul_(2)
        c.add_(1)
        return c, row + c[:, i % 3].sum()

    return given.scan(body, given.randn(4, 3, grad=True), given.tensor(torch.arange(4)))


@pytest.mark.parametrize("program", [decoder, views])
def test_as_the_loop(program):
    check(program)


def test_one_while_and_no_value_on_the_host():
    table = torch.randn(5, 3, device="xla")
    tokens = torch.tensor([1, 4, 0], device="xla")
    with DeviceWork() as work:
        h, _ = torch_scan_hop.scan(
            lambda h, t: (h * table[t], None), torch.ones(3, device="xla"), tokens
        )
        assert count_of("while", h) == 1
    assert not work.seen


def test_out_of_range_is_clamped():
    table = torch.arange(5.0, device="xla")
    tokens = torch.tensor([7, -9], device="xla")
    _, ys = torch_scan_hop.scan(
        lambda h, t: (h, h + table[t]), torch.zeros((), device="xla"), tokens
    )
    assert ys.tolist() == [4, 0]
