"""How a scan runs on XLA: one While, lowered once, nothing executed while tracing."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap

import pytest
import torch

pytestmark = [
    pytest.mark.xla,
    pytest.mark.works("XLA"),
    pytest.mark.filterwarnings("error:.*could not be traced"),
]
torch_xla = pytest.importorskip("torch_xla")

from cells import lstm_cell  # noqa: E402
from xla_harness import DeviceWork, count_of, n_compiles, steps_of_loops  # noqa: E402

from torch_scan_hop import fallback, scan  # noqa: E402
from torch_scan_hop.rewrites import using_options  # noqa: E402
from torch_scan_hop.xla import lower  # noqa: E402


def lstm(n_in=5, n_hidden=4):
    """A cell, its weights, and inputs for 6 steps of batch 2."""
    weights = [
        torch.randn(*shape).mul(0.3).to("xla").requires_grad_()
        for shape in [(n_in, 4 * n_hidden), (n_hidden, 4 * n_hidden), (4 * n_hidden,)]
    ]
    init = tuple(torch.zeros(2, n_hidden, device="xla") for _ in range(2))
    return lstm_cell(*weights), weights, init, torch.randn(6, 2, n_in).to("xla")


def settle():
    torch_xla.sync(wait=True)


def test_one_while_forward_and_two_in_training():
    cell, weights, init, x = lstm()
    with torch.no_grad():
        _, ys = scan(cell, init, x)
    assert count_of("while", ys) == 1
    _, ys = scan(cell, init, x)
    gradients = torch.autograd.grad(ys.sum(), weights)
    assert count_of("while", ys, *gradients) == 2


def dots(step):
    """The shapes of a step's products."""
    return [re.search(r"= (\w+\[[\d,]*\])", line)[1] for line in step if " dot(" in line]


def stacks(step, length):
    return [line for line in step if re.search(rf"= \w+\[{length}[,\]]", line)]


@pytest.fixture
def _products_leave(monkeypatch):
    """As on a device that is no CPU, whatever the size of a weight."""
    monkeypatch.setattr(lower, "LEAST_WEIGHT_ON_A_CPU", 0)


@pytest.mark.parametrize(("rows", "products_in_the_loop"), [(31, 2), (32, 1)])
def test_on_a_cpu_a_product_with_a_large_weight_leaves_the_loop(
    rows, products_in_the_loop, monkeypatch
):
    monkeypatch.setattr(lower, "LEAST_WEIGHT_ON_A_CPU", 32 * 16 * 4)
    cell, _, init, x = lstm(n_in=rows)
    with torch.no_grad():
        _, ys = scan(cell, init, x)
    (step,) = steps_of_loops(ys)
    assert dots(step) == ["f32[2,16]"] * products_in_the_loop


def test_on_a_cpu_the_products_of_small_layers_stay():
    """Those of the inputs, of the outputs, and of their gradients."""
    cell, weights, init, x = lstm()
    project = torch.randn(4, 3).to("xla").requires_grad_()
    x.requires_grad_()

    def projected(state, x):
        state, h = cell(state, x)
        return state, h @ project

    _, ys = scan(projected, init, x)
    gradients = torch.autograd.grad(ys.sum(), [*weights, project, x])
    forward, backward = steps_of_loops(ys, *gradients)
    assert sorted(dots(forward)) == ["f32[2,16]", "f32[2,16]", "f32[2,3]"]
    assert sorted(dots(backward)) == ["f32[2,4]", "f32[2,4]", "f32[2,5]"]


@pytest.mark.usefixtures("_products_leave")
def test_the_loop_of_the_forward_holds_the_recurrent_product_alone():
    cell, _, init, x = lstm()
    with torch.no_grad():
        _, ys = scan(cell, init, x)
        (step,) = steps_of_loops(ys)
        assert dots(step) == ["f32[2,16]"]  # h @ w; x @ w_in is one product before the loop
        assert stacks(step, 6) == []
        with using_options(batch_xs=False):
            _, ys = scan(cell, init, x)
            (step,) = steps_of_loops(ys)
            assert dots(step) == ["f32[2,16]", "f32[2,16]"]


@pytest.mark.usefixtures("_products_leave")
def test_the_loop_of_the_backward_holds_no_gradient_of_a_weight():
    cell, weights, init, x = lstm()
    _, ys = scan(cell, init, x)
    gradients = torch.autograd.grad(ys.sum(), weights)
    forward, backward = steps_of_loops(ys, *gradients)
    assert dots(forward) == ["f32[2,16]"]
    assert dots(backward) == ["f32[2,4]"]  # the gradient of h, which the step before needs
    assert stacks(forward, 6) == stacks(backward, 6) == []
    # outside: x @ w_in, and one contraction over all steps for each weight
    assert count_of("dot", ys, *gradients) == 2 + 3
    with using_options(contract_accumulators=False):
        _, ys = scan(cell, init, x)
        _, backward = steps_of_loops(ys, *torch.autograd.grad(ys.sum(), weights))
        assert sorted(dots(backward)) == ["f32[2,4]", "f32[4,16]", "f32[5,16]"]


def test_nothing_runs_while_tracing():
    cell, weights, init, x = lstm()
    ones = torch.ones(6, 2, 4).to("xla")
    settle()
    with DeviceWork() as work:
        _, ys = scan(cell, init, x)
        gradients = torch.autograd.grad(ys, weights, ones)
    assert not work.seen
    with DeviceWork() as work:
        _, ys = scan(cell, init, x)
        gradients = torch.autograd.grad(ys, weights, ones)
    assert not work.seen
    assert len(gradients) == 3


def test_a_training_loop_compiles_one_step():
    cell, weights, init, x = lstm()
    optimizer = torch.optim.SGD(weights, lr=0.1)
    settle()
    losses, compiles = [], []
    for _ in range(4):
        optimizer.zero_grad()
        loss = scan(cell, init, x)[1].square().mean()
        loss.backward()
        optimizer.step()
        settle()
        losses.append(loss.item())
        compiles.append(n_compiles())
    assert losses == sorted(losses, reverse=True)
    assert compiles[1:] == [compiles[0]] * 3


def test_a_body_is_lowered_once():
    from torch_scan_hop.xla import program

    lowered = []
    assemble = program.assemble_scan
    cell, _, init, x = lstm(n_in=7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "assemble_scan", lambda *a: lowered.append(0) or assemble(*a))
        for _ in range(3):
            scan(cell, init, x)
        assert len(lowered) == 1
        scan(cell, init, x[:3])
        assert len(lowered) == 2
        scan(cell, init, x, reverse=True)
        scan(cell, init, x)
        assert len(lowered) == 3


def test_another_closure_is_another_program():
    def times(k):
        return scan(
            lambda c, x: (c * k + x, None),
            torch.ones(2, device="xla"),
            torch.zeros(3, 2, device="xla"),
        )[0]

    assert times(2.0).tolist() == [8, 8]
    assert times(3.0).tolist() == [27, 27]
    w = torch.full((2,), 2.0, device="xla")
    assert times(w).tolist() == [8, 8]
    with torch.no_grad():
        w.mul_(2)
    assert times(w).tolist() == [64, 64]


def test_numbers_are_constants_of_the_loop():
    def cell(c, x):
        return c * 0.125 + x * 3.5 + 7, c

    c = torch.zeros(3, device="xla")
    x = torch.ones(4, 3, device="xla")
    settle()
    with DeviceWork() as work:
        _, ys = scan(cell, c, x)
    assert not work.seen
    assert count_of("parameter", ys) - _parameters_in_loops(ys) <= 2


def _parameters_in_loops(*tensors):
    from xla_harness import hlo_of

    text = hlo_of(*tensors)
    entry = text[text.index("ENTRY") :]
    return sum(" parameter(" in line for line in text.splitlines()) - sum(
        " parameter(" in line for line in entry.splitlines()
    )


def test_checkpointing_saves_less():
    w = torch.randn(4, 4).to("xla").requires_grad_()

    def cell(h, x):
        for _ in range(3):
            h = torch.tanh(torch.sigmoid(h @ w + x) * torch.exp(x - h))
        return h, h

    def saved(checkpoint):
        elements = 0

        def pack(t):
            nonlocal elements
            elements += t.numel()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            scan(
                cell,
                torch.zeros(2, 4, device="xla"),
                torch.randn(50, 2, 4).to("xla"),
                checkpoint=checkpoint,
            )
        return elements

    assert saved("full") < 0.5 * saved(None)


def test_checkpointing_computes_again_in_the_backward_alone():
    def cell(c, x):
        for _ in range(10):
            c, x = torch.sin(c), torch.sin(x)
        return c, x

    def sines_in_the_backward(checkpoint):
        h, x = (torch.randn(*s).to("xla").requires_grad_() for s in [(4, 4), (20, 4, 4)])
        carry, ys = scan(cell, h, x, checkpoint=checkpoint)
        settle()
        return count_of("sine", *torch.autograd.grad(carry.sum() + ys.sum(), (h, x)))

    assert sines_in_the_backward(None) == 0
    assert sines_in_the_backward("full") >= 2 * 9  # of the last sine, only the cosine is needed


def test_a_closed_over_random_tensor_is_drawn_once():
    noise = torch.randn(3, device="xla")  # pending: not computed yet

    def cell(c, x):
        return c, x + noise

    _, ys = scan(cell, torch.zeros(3, device="xla"), torch.zeros(4, 3, device="xla"))
    assert (ys == ys[0]).all()


def random_walk(h, x):
    h = torch.nn.functional.dropout(h + x, 0.5)
    return h, h


def _walk():
    return scan(random_walk, torch.ones(64, device="xla"), torch.ones(5, 64, device="xla"))[1]


def test_each_step_draws_anew():
    masks = _walk().cpu() != 0
    assert all((masks[t] != masks[t + 1]).any() for t in range(4))


def test_a_seed_gives_the_same_numbers_cold_and_warm():
    draws = []
    for _ in range(3):
        torch_xla.manual_seed(7)
        draws.append((_walk().cpu(), torch.rand(3, device="xla").cpu()))
    for walk, after in draws[1:]:
        assert torch.equal(walk, draws[0][0])
        assert torch.equal(after, draws[0][1])
    torch_xla.manual_seed(8)
    assert not torch.equal(_walk().cpu(), draws[0][0])


def test_each_step_draws_anew_whatever_was_lowered_before():
    def kept(length):
        def drop(c, _):
            return torch.nn.functional.dropout(c, 0.5), None

        out, _ = scan(drop, torch.ones(4096, device="xla"), None, length)
        return (out != 0).float().mean().item()

    for length in (1, 2, 3):
        assert abs(kept(length) - 0.5**length) < 0.04


def test_random_bodies_do_not_recompile():
    compiles = []
    for _ in range(3):
        _walk()
        settle()
        compiles.append(n_compiles())
    assert compiles[2] == compiles[1] == compiles[0]


def test_the_gradient_uses_the_mask_of_the_forward():
    w = torch.full((64,), 3.0).to("xla").requires_grad_()

    def cell(c, x):
        y = torch.nn.functional.dropout(x * w, 0.5)
        return c, y

    _, ys = scan(cell, torch.zeros(1, device="xla"), torch.ones(6, 64, device="xla"))
    (gradient,) = torch.autograd.grad(ys.sum(), w)
    torch.testing.assert_close(gradient * 3, ys.detach().sum(0))


def test_autocast():
    w = torch.randn(8, 8).to("xla").requires_grad_()
    h, x = torch.randn(2, 8).to("xla"), torch.randn(4, 2, 8).to("xla")

    def cell(h, x):
        product = h @ w
        return torch.tanh(product + x), product

    with torch.autocast("xla", dtype=torch.bfloat16):
        carry, ys = scan(cell, h, x)
    assert (carry.dtype, ys.dtype) == (torch.float32, torch.bfloat16)
    plain = scan(cell, h, x)[1]
    assert plain.dtype == torch.float32
    torch.testing.assert_close(ys.float(), plain, atol=0.1, rtol=0.1)
    (gradient,) = torch.autograd.grad(ys.float().sum(), w)
    (expected,) = torch.autograd.grad(plain.sum(), w)
    torch.testing.assert_close(gradient, expected, atol=0.3, rtol=0.1)


def test_exceptions_keep_their_type():
    class Broken(Exception):
        pass

    def cell(c, x):
        raise Broken("here")

    with pytest.raises(Broken, match="here"):
        scan(cell, torch.zeros(2, device="xla"), torch.zeros(3, 2, device="xla"))
    with pytest.raises(RuntimeError, match=r"shape|size"):
        scan(
            lambda c, x: (c @ x, None),
            torch.zeros(2, 3, device="xla"),
            torch.zeros(3, 2, 5, device="xla"),
        )
    settle()


@pytest.mark.parametrize(
    "read",
    [
        lambda x: 1 if x[0] > 0 else 2,
        lambda x: x[x > 0].cumsum(0)[-1],
        lambda x: x.nonzero().cumsum(0)[-1].sum(),
        lambda x: x.repeat(17).tolist()[0],  # more numbers than are read one by one
        lambda x: x.cpu().to(x.device),
    ],
    ids=["branch", "mask", "nonzero", "tolist", "cpu"],
)
def test_reading_a_value_is_refused(read):
    x = torch.ones(3, 2, device="xla")
    settle()
    with DeviceWork() as work:
        with pytest.raises(RuntimeError, match=r"reads the value of a tensor.*torch\.where"):
            scan(lambda c, x: (c + read(x), None), torch.zeros(2, device="xla"), x)
    assert not work.seen


def test_what_a_step_reads_as_a_number_stays_on_the_device():
    x = torch.arange(6.0).reshape(3, 2).to("xla")
    settle()
    with DeviceWork() as work:
        carry, ys = scan(
            lambda c, x: (c + 0.5 * x.sum().item(), float(x[0])), torch.zeros(2, device="xla"), x
        )
    assert not work.seen
    assert carry.dtype == ys.dtype == torch.float32
    assert carry.tolist() == [7.5, 7.5] and ys.tolist() == [0, 2, 4]


def test_rows_that_a_mask_selects_stay_on_the_device():
    x = torch.ones(3, 2, device="xla")
    settle()
    with DeviceWork() as work:
        carry, ys = scan(
            lambda c, x: (c + x[x > 0].sum(), x[x.nonzero().squeeze(1)].mean()),
            torch.zeros(2, device="xla"),
            x,
        )
    assert not work.seen
    assert carry.tolist() == [6, 6] and ys.tolist() == [1, 1, 1]


def test_checks_are_left_out():
    def body(h, x):
        n = torch.tanh(h + x)
        torch._assert_async((n < 2).all())
        return n, n

    xs = torch.linspace(-1, 1, 60).reshape(20, 3)
    ours = scan(body, torch.zeros(3, device="xla"), xs.to("xla"))
    torch.testing.assert_close(ours[1].cpu(), scan(body, torch.zeros(3), xs)[1])


def test_reading_a_value_is_refused_by_the_operator():
    from torch_scan_hop.op import scan_op

    def body(c, x):
        return (c * x.sum().item(),)

    with pytest.raises(RuntimeError, match=r"reads the value of a tensor.*torch\.where"):
        scan_op(body, [torch.zeros(2, device="xla")], [torch.zeros(3, 2, device="xla")], ())
    settle()


def test_an_operator_without_a_lowering_is_refused():
    def cell(c, x):
        return c + torch.histc(x, 4), None

    with fallback("error"), pytest.raises(NotImplementedError, match=r"aten::histc.*cannot lower"):
        scan(cell, torch.zeros(4, device="xla"), torch.zeros(3, 2, device="xla"))
    settle()


def test_no_crash_at_exit_after_an_exception():
    program = """
        import torch, torch_xla
        from torch_scan_hop import scan

        def cell(c, x):
            leaked.append(c + x)
            raise ValueError("in the body")

        leaked = []
        try:
            scan(cell, torch.zeros(2, device="xla"), torch.zeros(3, 2, device="xla"))
        except ValueError:
            pass
        torch_xla.sync()
        print(torch.ones(2, device="xla").sum().item())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "2.0"
