"""Loops as replays of CUDA graphs, without a GPU: graphs are ``fake_graphs`` on the CPU."""

from __future__ import annotations

import contextlib
import functools
import re
import threading

import pytest
import torch
import torch.nn.functional as F
from fake_graphs import CountedGraphs, GraphsOfOperators
from graph_caches import graph_caches
from on_the_cpu import serving
from oracle import assert_same, differentiable, gradients
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from wrappers import loops

from torch_scan_hop import progress_bar, scan
from torch_scan_hop._torch.absent_gpu import why_not_here
from torch_scan_hop._torch.fakes import FakeTensorMode
from torch_scan_hop.cuda_graphs import recording
from torch_scan_hop.cuda_graphs.capturable import why_not_captured
from torch_scan_hop.cuda_graphs.graphed import MOST_RECORDINGS, GraphedLoop
from torch_scan_hop.cuda_graphs.recording import Operands, steps_of_a_block
from torch_scan_hop.op import scan_op
from torch_scan_hop.reference import scan_loop
from torch_scan_hop.rewrites import using_options

# --- a loop by hand ---


def decay(order, carry, xs, additional, ys):
    """``h = a * h + x``, which gives each h."""
    (h,), (a, _) = carry, additional
    for t in order:
        h = a * h + xs[0][t]
        ys[0][t].copy_(h)
    return [h]


@functools.cache
def that_stays(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100))


def operands(T, *shape, seed=0, moves=False):
    """``moves``: whether ``additional`` lies elsewhere than in other calls.

    A graph reads it where it was when captured; what has moved is captured anew, with a slot.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = shape or (3,)

    def draw(*sizes):
        return torch.randn(*sizes, generator=generator)

    additional = [draw(*shape) if moves else that_stays(*shape), 2]
    return [draw(*shape)], [draw(T, *shape)], additional, [torch.empty(T, *shape)]


def called(run, T, reverse=False, given=None):
    """The final carry and ys of ``run``, and of the loop itself."""
    order = range(T - 1, -1, -1) if reverse else range(T)
    carry, xs, additional, ys = given or operands(T)
    same = [ys[0].clone()]
    got = [*run(decay, order, carry, xs, additional, ys), *ys]
    return got, [*decay(order, carry, xs, additional, same), *same]


@contextlib.contextmanager
def mock_served(made=None):
    made = made or CountedGraphs()
    with serving("cpu", made):
        yield made


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", [CountedGraphs, GraphsOfOperators])
def test_any_number_of_steps_is_replays_of_one_block(kind, reverse):
    run = GraphedLoop()
    with mock_served(kind()) as graphs:
        for number, T in enumerate([64, 64, 33, 100, 32, 5, 0, 1, 96]):
            before = graphs.replays
            given = operands(T, seed=number)
            assert_same(*called(run, T, reverse, given), 1e-6)
            # the first call is plain, and so is what is less than a block
            assert graphs.replays - before == (T // 32 if number else 0)
    assert graphs.captures == 1


def test_a_short_first_capture_does_not_stay():
    run = GraphedLoop()
    with mock_served() as graphs:
        for seed, T in enumerate((5, 5, 9, 64, 9, 64)):
            given = operands(T, seed=seed)
            assert_same(*called(run, T, given=given), 1e-6)
    # of 5 steps, and of 32
    assert (graphs.captures, graphs.replays) == (2, 1 + 1 + 2 + 0 + 2)


@pytest.mark.parametrize(
    ("T", "steps"),
    [(3, 0), (4, 4), (31, 31), (32, 32), (33, 32), (100, 25), (1000, 25), (1009, 28)],
)
def test_few_steps_are_left_over(T, steps):
    assert steps_of_a_block(T, Operands(*operands(T))) == steps


def test_slots_are_bounded(monkeypatch):
    large = Operands(*operands(64, 1024))
    monkeypatch.setattr(recording, "MOST_BYTES", 2 * 4 * 8 * 1024)
    assert steps_of_a_block(64, large) == 8
    monkeypatch.setattr(recording, "MOST_BYTES", 2 * 4 * 2 * 1024)
    assert steps_of_a_block(64, large) == 0


@pytest.mark.parametrize("kind", [CountedGraphs, GraphsOfOperators])
def test_what_moves_is_copied_and_what_stays_is_read_where_it_is(kind):
    run = GraphedLoop()
    with mock_served(kind()) as graphs:
        for seed in range(3):
            assert_same(*called(run, 64, given=operands(64, seed=seed)), 1e-6)
        (seen,) = run._seen.values()
        assert graphs.captures == 1 and not seen.recording.additional
        that_stays(3).mul_(0.5)  # a step of an optimizer
        assert_same(*called(run, 64), 1e-6)
        assert graphs.captures == 1
        keep = []  # or the next one would be where the last one was
        for seed in range(3):
            keep.append(operands(64, seed=seed, moves=True))
            assert_same(*called(run, 64, given=keep[-1]), 1e-6)
        assert graphs.captures == 2 and seen.recording.additional.keys() == {0}


def test_xs_of_any_layout():
    for x in (
        torch.randn(3, 64).t(), torch.randn(64, 6)[:, ::2], torch.randn(3).expand(64, 3),
        torch.randn(64, 1).expand(64, 3), torch.randn(66).unfold(0, 3, 1),
        torch.randn(1, 3).expand(64, 3),
    ):  # fmt: skip
        run = GraphedLoop()
        with mock_served() as graphs:
            for _ in range(2):
                carry, _, additional, ys = operands(64)
                assert_same(*called(run, 64, given=(carry, [x], additional, ys)), 1e-6)
        assert graphs.replays == 2


def test_carries_that_change_places():
    def swap(order, carry, xs, additional, ys):
        a, b = carry
        for _ in order:
            a, b = b, a
        return [a, b]

    run, a, b = GraphedLoop(), torch.tensor(1.0), torch.tensor(2.0)
    for kind in (CountedGraphs, GraphsOfOperators):
        with mock_served(kind()):
            for T in (5, 5, 10):
                got = run(swap, range(T), [a, b], [torch.empty(T, 0)], [], [])
                assert got == ([b, a] if T % 2 else [a, b])


def test_each_shape_and_stream_has_a_graph_up_to_some():
    run = GraphedLoop()
    with mock_served() as graphs:
        for width in range(1, MOST_RECORDINGS + 3):
            for _ in range(2):
                assert_same(*called(run, 32, given=operands(32, width)), 1e-6)
        assert graphs.captures == graphs.replays == MOST_RECORDINGS
    run = GraphedLoop()
    with mock_served() as graphs:
        for graphs.current_stream in (1, 2, 1, 2):
            assert_same(*called(run, 32), 1e-6)
        assert graphs.captures == graphs.replays == 2


def test_a_number_that_differs_is_another_graph():
    def scaled(order, carry, xs, additional, ys):
        return [carry[0] * additional[0] ** len(order)]

    run = GraphedLoop()
    with mock_served(GraphsOfOperators()) as graphs:
        for number in (2.0, 2.0, 3.0, 3.0):
            (got,) = run(scaled, range(4), [torch.ones(2)], [torch.empty(4, 0)], [number], [])
            assert got.tolist() == [number**4] * 2
    assert graphs.captures == 2


def test_a_capture_under_way_is_not_disturbed():
    run = GraphedLoop()
    with mock_served() as graphs:
        called(run, 64)
        graphs.capturing = True
        assert_same(*called(run, 64), 1e-6)
        assert graphs.captures == 0


def test_a_capture_that_fails_is_a_loop_from_then_on(caplog):
    run = GraphedLoop()
    with mock_served(CountedGraphs(fails=True)) as graphs:
        for _ in range(4):
            assert_same(*called(run, 64), 1e-6)
    assert (graphs.captures, graphs.replays, graphs.recoveries) == (1, 0, 1)
    (record,) = caplog.records
    assert "launched step by step" in record.message and "not permitted" in str(record.exc_info)
    caplog.clear()  # what was tried is what this is about


def test_slots_serve_one_call_at_a_time():
    run, inner = GraphedLoop(), []

    def calling(*arguments):
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=lambda: inner.append(called(run, 64)))
            thread.start()
            thread.join()
        return decay(*arguments)

    with mock_served() as graphs:
        called(run, 64)
        for _ in range(2):
            run(calling, range(64), *operands(64))
    assert_same(*zip(*inner, strict=True), 1e-6)
    # the thread that each replay waits for gets no slots
    assert graphs.captures == 1 and graphs.replays == len(inner) == 2 * 2


def test_who_wants_to_see_each_step_does():
    pytest.importorskip("tqdm")
    run = GraphedLoop()
    with mock_served() as graphs:
        called(run, 64)
        with progress_bar.progress():
            assert_same(*called(run, 64), 1e-6)
        assert graphs.captures == 0


# --- which bodies ---


def graph_of(step, *inputs):
    with torch.no_grad(), mock_served():
        return why_not_captured(make_fx(step)(*inputs))


H = torch.ones(2, 3)
BODIES = {
    "cell": (lambda h, x: (torch.tanh(h @ h.t() @ x), h.sum()), ""),
    "attention": (
        lambda h, x: F.scaled_dot_product_attention(h[None], x[None], x[None]), "",
    ),
    "index": (lambda h, x: x[h.argmax(-1)], ""),
    "dropout": (lambda h, x: F.dropout(h, 0.5) + x, "it draws random numbers"),
    "draws": (lambda h, x: torch.rand_like(h) + x, "it draws random numbers"),
    "attention with dropout": (
        lambda h, x: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            h[None, None], x[None, None], x[None, None], 0.5
        )[0],
        "it draws random numbers",
    ),
    "mask": (lambda h, x: torch.index_put(h, (h > 0,), x[0, 0]), "a mask among its indices"),
    "masked": (lambda h, x: h.masked_select(x > 0).sum() + h, "depends on values"),
    "custom": (lambda h, x: unknown(h) + x, "nobody knows what it launches"),
    "elsewhere": (lambda h, x: (h + x, torch.zeros(3, device="meta")), "not on the GPU"),
}  # fmt: skip


@torch.library.custom_op("test_cuda_graphs::unknown", mutates_args=())
def unknown(h: torch.Tensor) -> torch.Tensor:
    return h.clone()


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_may_be_captured(name):
    step, reason = BODIES[name]
    with contextlib.ExitStack() as stack:
        if name == "attention with dropout":  # nothing runs: it is a fake's
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        told = graph_of(step, H, H + 1)
    assert (reason in told) if reason else (told == "")


def test_a_number_of_a_given_seed_is_the_same_for_each_replay_of_it():
    from torch._inductor import inductor_prims

    def told_of(seed):
        graph = torch.fx.Graph()
        of = graph.placeholder("seed") if seed is None else graph.call_function(*seed)
        graph.output(graph.call_function(inductor_prims.random, ([2, 3], of, "rand")))
        with mock_served():
            return why_not_captured(torch.fx.GraphModule({}, graph))

    assert told_of(None) == ""
    assert "it draws" in told_of((inductor_prims.seed, (torch.device("cpu"),)))


def test_a_body_that_asks_for_a_number_is_not_captured():
    graph = torch.fx.Graph()
    h = graph.placeholder("h")
    graph.output(graph.call_function(torch.ops.aten._local_scalar_dense.default, (h,)))
    with mock_served():
        assert "reads a value on the host" in why_not_captured(torch.fx.GraphModule({}, graph))


def test_a_body_within_a_body_is_looked_at():
    def outer(inner):
        graph = torch.fx.Graph()
        h, x, body = graph.placeholder("h"), graph.placeholder("x"), graph.get_attr("body")
        graph.output(graph.call_function(scan_op, (body, [h], [x], ())))
        return torch.fx.GraphModule({"body": inner}, graph)

    with mock_served(), torch.no_grad():
        assert why_not_captured(outer(make_fx(lambda h, x: (h + x, h))(H, H))) == ""
        draws = outer(make_fx(lambda h, x: (F.dropout(h) + x, h))(H, H))
        assert "it draws random numbers" in why_not_captured(draws)


# --- compiled, and in eager mode ---


def attend(carry, x, p):
    keys, values = carry
    q, k, v = (x @ p["w"]).chunk(3, -1)
    keys = torch.cat([keys[:, 1:], k[:, None]], 1)
    values = torch.cat([values[:, 1:], v[:, None]], 1)
    weights = torch.softmax((keys @ q[:, :, None])[..., 0], -1)
    return (keys, values), (weights[:, None] @ values)[:, 0]


def wide(h, x, p):
    """A y that is the carry, and a carry that has its last value for a y."""
    following = torch.tanh(h @ p["u"] + x)
    return following, {"before": h, "after": following, "sum": (h * x).cumsum(-1)}


def inputs_of(step, T, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        made = torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.3
        return made.requires_grad_()

    if step is attend:
        return (draw(2, 5, 4), draw(2, 5, 4)), draw(T, 2, 4), {"w": draw(4, 12)}
    return draw(2, 4), draw(T, 2, 4), {"u": draw(4, 4)}


def check(run, step, T, reverse, seed=0):
    init, xs, p = inputs = inputs_of(step, T, seed)
    got = run(init, xs, p)
    want = scan_loop(lambda c, x: step(c, x, p), init, xs, T, reverse)
    assert_same(got, want, 1e-9)
    wrt = differentiable(inputs)
    assert_same(gradients(got, wrt), gradients(want, wrt), 1e-9)


def whole(step, reverse=False):
    return lambda init, xs, p: scan(lambda c, x: step(c, x, p), init, xs, reverse=reverse)


@contextlib.contextmanager
def replaying(kind=CountedGraphs):
    options = using_options(cuda_graphs=True, one_kernel=False)
    with mock_served(kind()) as graphs, options, graph_caches(False):
        yield graphs


@pytest.mark.parametrize(
    ("step", "reverse"), [(wide, True), pytest.param(attend, False, marks=pytest.mark.slow)]
)
def test_a_compiled_loop_is_replayed(step, reverse):
    with replaying() as graphs:
        run = torch.compile(whole(step, reverse), fullgraph=True)
        for seed in range(4):
            check(run, step, 40, reverse, seed)
    # two blocks of 20 steps each way, from the second call on
    assert graphs.replays == 2 * 2 * 3 and 2 <= graphs.captures <= 6


def drops(h, x, p, drawn=None):
    drawn = torch.rand_like(h) > 0.3 if drawn is None else drawn
    h = torch.tanh(h @ p["u"] + x).cumsum(-1) * drawn
    return h, (h, drawn)


def test_a_compiled_loop_that_draws_is_replayed():
    """Its seeds are xs: a replay has those of its own steps."""
    patterns = []
    with replaying() as graphs:
        run = torch.compile(whole(drops), fullgraph=True)
        for seed in range(4):
            init, xs, p = inputs = inputs_of(drops, 40, seed)
            got = run(*inputs)
            drawn, wrt = got[1][1], differentiable(inputs)
            want = scan_loop(
                lambda c, x, p=p: drops(c, x[0], p, x[1]), init, (xs, drawn), 40, False
            )
            assert_same(got, want, 1e-9)
            assert_same(gradients(got, wrt), gradients(want, wrt), 1e-9)
            patterns += drawn.flatten(1).unbind()
    assert graphs.replays >= 2 * 2 * 3 and len(torch.stack(patterns).unique(dim=0)) > 60


@pytest.mark.slow
def test_a_compiled_loop_of_any_length_is_replayed():
    with replaying() as graphs:
        compiled = torch.compile(whole(wide), fullgraph=True)

        def run(init, xs, p):
            torch._dynamo.mark_dynamic(xs, 0)
            return compiled(init, xs, p)

        for seed, T in enumerate((40, 33, 64)):
            check(run, wide, T, False, seed)
    assert graphs.captures == 2 and graphs.replays == 2 * (1 + 2)


EAGER = [(attend, True, GraphsOfOperators), (wide, False, GraphsOfOperators)]
MORE = [
    (attend, False, CountedGraphs),
    (wide, True, GraphsOfOperators),
    (wide, True, CountedGraphs),
]


@pytest.mark.parametrize(
    ("step", "reverse", "kind"), EAGER + [pytest.param(*m, marks=pytest.mark.slow) for m in MORE]
)
def test_an_eager_loop_is_replayed(step, reverse, kind):
    with replaying(kind) as graphs:
        for seed, T in enumerate((40, 40, 40, 57)):
            check(whole(step, reverse), step, T, reverse, seed)
    assert graphs.replays >= 8


@pytest.mark.parametrize("is_on", [True, False])
def test_the_switch(is_on):
    with mock_served() as graphs, using_options(**({} if is_on else {"cuda_graphs": False})):
        for seed in range(3):
            check(whole(wide), wide, 40, False, seed)
    assert (graphs.captures > 0) is is_on


def test_a_graph_is_of_the_settings_that_it_was_captured_under():
    """Products are rounded as the user lets them be now, not as they were when it was captured."""
    run = GraphedLoop()
    before = torch.get_float32_matmul_precision()
    try:
        with mock_served() as graphs:
            for precision in ("highest", "highest", "high", "high", "highest"):
                torch.set_float32_matmul_precision(precision)
                assert_same(*called(run, 32), 1e-6)
            assert (graphs.captures, graphs.replays) == (2, 3)
    finally:
        torch.set_float32_matmul_precision(before)


# --- the wrapper for a GPU ---

cuda = pytest.mark.skipif(bool(why_not_here()), reason="nothing stands in for a GPU on this torch")


def wrappers_of(step, **config):
    from fake_cuda import wrappers

    def as_float32(t):
        return t.detach().float().requires_grad_()

    inputs = pytree.tree_map_only(torch.Tensor, as_float32, inputs_of(step, 12))
    with torch._inductor.config.patch(config):
        return wrappers(whole(step), *inputs)


@cuda
def test_a_wrapper_hands_its_loop_over():
    with using_options(cuda_graphs=True, one_kernel=False):
        found = wrappers_of(wide)
    assert found.keys() == {"forward", "backward"}
    for wrapper in found.values():
        _, _, called = wrapper.partition("def call(")
        assert called.count("= graphed_loop_") == called.count("def scan_loop_") == 1
        # kernels are launched on the stream that is captured
        function = called.partition("def scan_loop_")[2].partition("= graphed_loop_")[0]
        launches = [n for n in function.split("stream=")[1:]]
        assert launches and "get_raw_stream(0)" in function
        assert loops([wrapper]) == [1]


@cuda
def test_graphs_of_torch_take_the_loop_as_it_is():
    """With mode="reduce-overhead" torch captures all that is compiled, the loop in it."""
    import fake_cuda

    with using_options(cuda_graphs=True, one_kernel=False):
        found = wrappers_of(wide, **{"triton.cudagraphs": True})
    assert fake_cuda.against_graphs == [""] * 2
    for wrapper in found.values():
        assert "graphed_loop" not in wrapper and loops([wrapper]) == [1]
        # a function to capture, and the loop within it with all of its launches
        (partition,) = re.findall(r"^def partition_\d+\(.*?^\S", wrapper, re.M | re.S)
        step = partition.partition("for u0 in ")[2]
        assert step.count("stream=") >= 1 and "self.partitions" not in partition
