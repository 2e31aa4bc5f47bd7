"""The fuzzer itself, and a fixed handful of its programs; ``make fuzz`` runs many."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from fuzz import by_hand
from fuzz.campaign import CHUNK, Found, Tally, run_here, run_isolated, shrunk
from fuzz.check import Outcome, check, check_text, difference
from fuzz.direct import operator_scan
from fuzz.generate import DEFAULT, SWITCHES, generate
from fuzz.modes import GROUPS, parse_mode, parse_modes
from fuzz.mutants import MUTANTS, record_searches, search
from fuzz.program import tolerance_of
from fuzz.record import record

import torch_scan_hop
from torch_scan_hop.inductor.cpu import sharing

# programs say with a warning that they ran as a loop, which the fuzzer counts
pytestmark = pytest.mark.filterwarnings("default")

EAGER = parse_mode("eager")


def failures(seeds, mode, features=DEFAULT):
    found = run_here(seeds, [parse_mode(mode)], features)
    return [(f.seed, f.outcome) for f in found if f.outcome.is_failure]


# --- programs ---

#: seeds of programs whose causes stand yet
NOT_MENDED: set[int] = set()
#: what needs neither an index nor a buffer compiles in a second or two
QUICK = ("pointwise", "products", "reductions", "views", "trees")


@pytest.mark.parametrize(
    "start", [0, 6, 12, *(pytest.param(start, marks=pytest.mark.slow) for start in (18, 24))]
)
def test_programs_in_eager_mode(start):
    seeds = [seed for seed in range(start, start + 6) if seed not in NOT_MENDED]
    assert not failures(seeds, "eager")


def test_programs_under_inductor():
    assert not failures([3], "inductor", QUICK)


def test_programs_as_scalars():
    mode = parse_mode("eager+scalars")
    outcomes = [check(generate(seed, QUICK), mode) for seed in range(6)]
    assert not [o for o in outcomes if o.is_failure]
    assert any(o.kernels for o in outcomes)


def test_two_threads_share_however_little_there_is_to_do():
    """Every kernel of the CPU, in the mode that says so."""
    function = mock.Mock()
    function.text = str
    with parse_mode("inductor+threads").entered():
        sharing.share(function, "work")
    (line,) = function.code.writeline.call_args.args
    assert ", work >= 1, " in line


@pytest.mark.parametrize("transform", ["double", "jvp", "vmap"])
def test_transformed_programs(transform):
    features = ("pointwise", "products", "reductions", "views", "layouts", "trees")
    assert not failures(range(3), f"eager+{transform}", features)


# --- generation ---


def test_the_same_seed_gives_the_same_text():
    features = (*DEFAULT, *SWITCHES)
    texts = [generate(seed, features).text() for seed in range(40)]
    assert texts == [generate(seed, features).text() for seed in range(40)]
    assert len(set(texts)) == 40


def test_every_text_is_python():
    for seed in range(200):
        compile(generate(seed, (*DEFAULT, *SWITCHES)).text(), "program", "exec")


def test_generation_does_not_touch_the_random_stream_of_torch():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    generate(5)
    assert torch.equal(before, torch.get_rng_state())


# --- a scan that is wrong ---


def test_a_lost_gradient_is_found_and_reduced():
    with MUTANTS["gradient_of_init_lost"].applied():
        found = next(
            f for f in run_here(range(20), [EAGER], ("pointwise",)) if f.outcome.is_failure
        )
        assert found.outcome.kind == "wrong gradient"
        program = shrunk(found, ("pointwise",), seconds=15)
        assert check(program, EAGER).kind == found.outcome.kind
    assert check(program, EAGER).status == "ok"
    assert len(program.body) <= 1
    assert len(program.text()) < len(generate(found.seed, ("pointwise",)).text())


def test_a_search_counts_the_programs_until_a_mutant_is_found():
    result = search("gradient_of_init_lost", range(20), [EAGER], ("pointwise",))
    assert result.found is not None
    assert result.programs <= 10


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_takes_out_what_is_there(name):
    with MUTANTS[name].applied():
        pass


#: captured once, in eager mode: found in a second or two
CHEAP = ["shared_memory_is_copied", "assignments_are_lost", "autocast_of_some_devices_is_no_key"]


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch 2.9 refuses some of what the mends refuse"
)
@pytest.mark.parametrize("name", CHEAP)
def test_a_mend_taken_out_is_found(name):
    assert search(name, range(12)).found is not None


@pytest.mark.slow
def test_every_mend_taken_out_is_found(tmp_path):
    page = tmp_path / "fuzz.md"
    # kernels of a GPU are searched in a process that interprets them (interpreted_tiles)
    names = [m.name for m in MUTANTS.values() if "triton" not in m.modes]
    results = record_searches(page, names)
    assert [m.name for m, result in results if result.found is None] == []
    assert {m.issue for m, _ in results} >= set("abcdefghi")
    assert all(name in page.read_text() for name in names)


PROGRAM = """\
import torch
dtype, cdtype = torch.float64, torch.complex128

def inputs(seed=0):
    g = torch.Generator().manual_seed(seed)
    return {"h0": normal(g, 2).requires_grad_()}

def normal(g, *shape):
    return torch.randn(*shape, dtype=dtype, generator=g)

def program(scan, h0):
    def body(h, x):
        BODY
        return h * 0.5, h
    return scan(body, h0, None, length=3)
"""


def outcome_of(line, mode=EAGER):
    text = PROGRAM.replace("BODY", line)
    return check_text(text, mode, tolerance_of(text))


def test_outcomes():
    assert outcome_of("h = h.sin()") == Outcome("ok")
    assert outcome_of("h = h.no_such_method()").status == "discarded"
    assert outcome_of("print(end=''); h = h if h.sum() > 0 else -h").status == "loop"


def test_what_the_last_digits_decide_is_discarded(monkeypatch):
    real = torch_scan_hop.scan
    monkeypatch.setattr(
        torch_scan_hop, "scan", lambda f, h, *a, **k: real(f, h * (1 + 1e-13), *a, **k)
    )
    assert outcome_of("h = h.sin()") == Outcome("ok")
    assert outcome_of("h = torch.sin(h * 1e13)") == Outcome("discarded", "", "ill-conditioned")


def test_a_difference_names_its_place():
    a, b = torch.tensor([0.1]), torch.tensor([0.2])
    assert difference({"value": a}, {"value": b}, 1e-7)[0] == "value"
    assert difference({"value": a}, {"value": a + 1e-9}, 1e-7) is None
    nan = torch.tensor([float("nan")])
    assert difference({"value": nan}, {"value": nan}, 1e-7) is None


def test_a_loop_by_hand_starts_with_numbers():
    xs = torch.tensor([3, 4], dtype=torch.int8)
    (carry, fixed), _ = by_hand.loop(
        lambda c, x: ((c[0] + x, 0.1), None), (0, torch.zeros((), dtype=torch.float64)), xs
    )
    assert (carry.dtype, carry.item()) == (torch.int8, 7)
    assert fixed.item() == 0.1


def test_the_operator_sees_one_module_for_one_body():
    scan, seen = operator_scan(), []

    def body(c, x):
        seen.append(c)
        return c + x * w, {"y": c}

    w = torch.tensor(2.0)
    carry, ys = scan(body, torch.zeros(()), torch.ones(4))
    assert (carry.item(), ys["y"].tolist()) == (8.0, [0.0, 2.0, 4.0, 6.0])


# --- campaigns ---


def test_a_dying_child_names_its_seed(monkeypatch):
    class Dying:
        reason, ended_well = "the process ended with -11", False

        def __init__(self, seeds, modes, features):
            self.seeds = seeds

        def lines(self):
            yield {"seed": self.seeds[0], "mode": "eager", "outcome": vars(Outcome("ok"))}
            yield {"start": self.seeds[1], "mode": "eager"}

    monkeypatch.setattr("fuzz.campaign._Child", Dying)
    found = list(run_isolated(range(4), [EAGER], DEFAULT))
    assert [(f.seed, f.outcome.status) for f in found] == [
        (0, "ok"), (1, "died"), (2, "ok"), (3, "died")
    ]  # fmt: skip
    assert CHUNK > 4


def test_a_tally_tells_new_failures_from_known_ones():
    tally = Tally()
    crash = Outcome("crash", "ValueError: #")
    assert tally.add(Found(0, "eager", crash))
    assert not tally.add(Found(1, "eager", crash))
    assert tally.add(Found(2, "eager", Outcome("wrong", "value")))
    assert not tally.add(Found(3, "eager", Outcome("loop", "reason")))
    assert (tally.statuses["crash"], tally.loops["reason"]) == (2, 1)


def test_a_record_is_a_row(tmp_path):
    page = tmp_path / "fuzz.md"
    tally = Tally(programs=2)
    tally.add(Found(0, "eager", Outcome("ok")))
    record(page, tally, ["eager"], "python -m tests.fuzz")
    page.write_text(page.read_text() + "\n## Another section\n")
    record(page, tally, ["inductor"], "python -m tests.fuzz")
    table = [line for line in page.read_text().splitlines() if "python -m tests" in line]
    assert ["| eager |" in table[0], "| inductor |" in table[1]] == [True, True]
    assert page.read_text().endswith("## Another section\n")


def test_modes_have_names():
    for group in GROUPS:
        assert [m.name for m in parse_modes(group)] == GROUPS[group]
    mode = parse_mode("inductor+only_batch_xs+small_blocks+double")
    assert (mode.transform, mode.small_blocks) == ("double", True)
    assert mode.options["batch_xs"] and not mode.options["hoist_invariant"]
    assert parse_mode("eager+operator").operator
    with pytest.raises(ValueError, match="no mode part"):
        parse_mode("eager+sideways")
