"""``debug()``: scans as loops that say in which step, and by which operator, it went wrong."""

from __future__ import annotations

import threading

import pytest
import torch
from oracle import assert_same, loop

from torch_scan_hop import NonFiniteError, debug, fallback, scan, scan_layers, set_default
from torch_scan_hop.debugging import is_debugging

F64 = torch.float64


def cell(h, x):
    h = torch.tanh(h + x)
    return h, {"y": h * 2}


def test_results_are_the_loop_s_and_nothing_is_captured():
    seen = []

    def body(h, x):
        seen.append(type(x))
        return cell(h, x)

    h, xs = torch.zeros(2, dtype=F64), torch.randn(4, 2, dtype=F64)
    with debug(detect_nonfinite=True):
        found = scan(body, h, xs, reverse=True)
    assert_same(found, loop(cell, h, xs, reverse=True))
    assert seen == [torch.Tensor] * 4


@pytest.mark.parametrize("detect_nonfinite", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_an_error_says_its_step(detect_nonfinite, reverse):
    def body(h, x):
        if x == 2:
            raise KeyError("on purpose")
        return h + x, None

    with pytest.raises(KeyError, match="on purpose") as caught, debug(detect_nonfinite):
        scan(body, torch.zeros(()), torch.arange(5.0), reverse=reverse)
    notes = "".join(getattr(caught.value, "__notes__", caught.value.args))
    assert "scan: raised in step 2 of 5 of body (" in notes


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_the_first_step_leaf_operator_and_line_of_a_nan(dtype):
    def body(carry, x):
        a = carry["a"] * 1
        b = torch.sqrt(carry["b"] - x)
        b = b / (b - b)
        return {"a": a, "b": b * 2}, a

    init = {"a": torch.ones(2, dtype=dtype), "b": torch.ones(2, dtype=dtype)}
    with pytest.raises(NonFiniteError) as caught, debug(detect_nonfinite=True):
        scan(body, init, torch.zeros(3, 2))
    line = r"carry\['b'\] holds (inf|nan) after step 0 of 3; aten.div.Tensor gave the first, at "
    assert caught.match(line + r".*test_debugging.py:\d+: b = b / \(b - b\)")


def test_what_does_not_reach_a_result_is_the_body_s():
    def attention(h, x):
        mask = torch.full((2, 2), float("-inf")).triu(1)
        return torch.softmax(mask, -1) @ h, x

    with debug(detect_nonfinite=True):
        h, _ = scan(attention, torch.ones(2), torch.tensor([1.0, float("nan"), 2.0]))
    assert h.isfinite().all()


def test_scans_in_scans_and_layers():
    def outer(h, x):
        h, _ = scan(lambda c, z: (torch.log(c - z), None), h, x)
        return h, None

    inner = r"nan after step 0 of 2; aten\.log.*(\n.*)?raised in step 1 of 2 of outer"
    with pytest.raises(NonFiniteError, match=inner), debug(True):
        scan(outer, torch.full((), 9.0), torch.tensor([[1.0, 2.0], [3.0, 9.0]]))
    with debug():
        x = torch.randn(2, 3)
        layers = torch.nn.ModuleList([torch.nn.Linear(3, 3) for _ in range(2)])
        torch.testing.assert_close(scan_layers(layers, x), layers[1](layers[0](x)))


def test_gradients_numbers_and_no_steps():
    w = torch.tensor(0.5, dtype=F64, requires_grad=True)
    xs = torch.randn(3, dtype=F64)

    def gradient(scan):
        return torch.autograd.grad(scan(lambda c, x: (torch.tanh(c * w + x), c), 0.1, xs)[0], w)

    with debug(detect_nonfinite=True), torch.autograd.detect_anomaly(check_nan=True):
        assert_same(gradient(scan), gradient(loop))
    with debug():
        assert_same(
            scan(cell, torch.zeros(2), torch.ones(0, 2)),
            loop(cell, torch.zeros(2), torch.ones(0, 2)),
        )


def test_it_ends_with_the_context_and_is_a_thread_s_own():
    def raising():
        with debug():
            raise ValueError

    with pytest.raises(ValueError):
        raising()
    assert not is_debugging()
    found = []
    with debug():
        thread = threading.Thread(target=lambda: found.append(is_debugging()))
        thread.start()
        thread.join()
        assert is_debugging()
    assert found == [False]


def test_compiled_calls_are_not_affected():
    run = torch.compile(lambda h, xs: scan(cell, h, xs), backend="eager", fullgraph=True)
    h, xs = torch.zeros(2), torch.randn(4, 2)
    with debug():
        assert_same(run(h, xs), loop(cell, h, xs), 1e-6)


# --- scans as they are, whose results are looked at ---


def logs(h, x):
    h = torch.log(h - x)
    return {"h": h}["h"], h * 2


START, ONES = torch.full((2,), 3.0), torch.ones(4, 2)
WHERE = r"carry holds nan after step 1 of 4; aten\.log\.default gave the first, at .*log\(h - x\)"


@pytest.mark.parametrize("compile", [False, True])
def test_a_nan_is_found_in_the_results_and_named_by_another_run(compile):
    scan(logs, START, ONES, compile=compile)
    with set_default(detect_nonfinite=True):
        with pytest.raises(NonFiniteError, match=WHERE):
            scan(logs, START, ONES, compile=compile)
        # the caller's own, and results that are finite though their sum is not
        assert scan(logs, START / 0, ONES, compile=compile)[0].isinf().all()
        huge = torch.full((4, 2), 3e38)
        assert scan(lambda h, x: (h, x + h), torch.zeros(2), huge)[1].sum().isinf()
        w = torch.full((2,), 0.5, requires_grad=True)
        scan(lambda h, x: (h * w + x, h), START, ONES, compile=compile)[0].sum().backward()
    assert w.grad.isfinite().all()
    assert scan(logs, START, ONES, compile=compile)[0].isnan().all()


def test_a_nan_that_does_not_come_again_is_an_error_all_the_same():
    runs = []

    def drawn(h, x):
        runs.append(float(h[0]))
        return (h / 0 if len(runs) == 1 else h + 1), None

    with fallback("allow"), set_default(detect_nonfinite=True):
        with pytest.raises(NonFiniteError, match=r"carry holds a nan.*draws random numbers"):
            scan(drawn, torch.ones(2), length=1)


@pytest.mark.torch_version
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_programs_name_the_leaf_and_run_as_python_under_debug(backend):
    program = torch.compile(lambda h, xs: scan(logs, h, xs), backend=backend, fullgraph=True)
    assert program(START, ONES)[0].isnan().all()
    with set_default(detect_nonfinite=True):
        with pytest.raises(RuntimeError, match=r"scan: carry holds a nan .*debug"):
            program(START, ONES)
        assert program(START / 0, ONES)[0].isinf().all()
    with debug(detect_nonfinite=True), pytest.raises(NonFiniteError, match=WHERE):
        program(START, ONES)
    assert program(START, ONES)[0].isnan().all()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_program_without_floating_point_inputs_is_checked(backend):
    def count(n, k):
        return n + k, 1.0 / n

    program = torch.compile(lambda n, ks: scan(count, n, ks), backend=backend, fullgraph=True)
    with set_default(detect_nonfinite=True):
        n, ys = program(torch.tensor(1), torch.ones(3, dtype=torch.int64))
        assert n == 4 and ys.isfinite().all()
        with pytest.raises(RuntimeError, match="scan: ys holds a nan or an inf"):
            program(torch.tensor(-1), torch.ones(3, dtype=torch.int64))


def test_an_exported_program_asserts():
    class Program(torch.nn.Module):
        def forward(self, h, xs):
            return scan(logs, h, xs)

    with set_default(detect_nonfinite=True):
        program = torch.export.export(Program(), (START, ONES), strict=True).module()
    with pytest.raises(RuntimeError, match=r"ys holds a nan|carry holds a nan"):
        program(START, ONES)
    assert program(START / 0, ONES)[0].isinf().all()
