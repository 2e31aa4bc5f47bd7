"""Every wrong argument: the type of the error, what it names, what it expected, the fix."""

from __future__ import annotations

from collections import namedtuple

import mistakes
import numpy as np
import pytest
import torch

from torch_scan_hop import Binomial, debug, scan

Pair = namedtuple("Pair", ["first", "second"])
XS = torch.ones(3, 2)
H = torch.zeros(2)


def add(h, x):
    return h + x, h


# name -> (arguments, options, error, message)
ARGUMENTS = {
    "not callable": (
        (3, H, XS),
        {},
        TypeError,
        "scan: combine_fn must be callable as combine_fn(carry, x), but got int. The first "
        "argument is the function.",
    ),
    "swapped arguments": ((H, add, XS), {}, TypeError, "combine_fn must be callable"),
    "length of another type": (
        (add, H, None, 2.5),
        {},
        TypeError,
        "scan: length must be an int, but got float.",
    ),
    "negative length": (
        (add, H, None, -1),
        {},
        ValueError,
        "scan: length must not be negative, but got -1.",
    ),
    "length that disagrees": (
        (add, H, {"a": XS}, 4),
        {},
        ValueError,
        "scan: length=4 disagrees with xs['a'], whose size along dim=0 is 3. Leave length out, or slice xs.",
    ),
    "no trip count": (
        (add, H),
        {},
        ValueError,
        "scan: xs holds no tensor, so there is no trip count. Pass length=T.",
    ),
    "only None in xs": ((add, H, {"a": None}), {}, ValueError, "no trip count"),
    "xs of different lengths": (
        (add, H, {"a": XS, "b": (torch.ones(4, 2),)}),
        {},
        ValueError,
        "scan: all xs must have one size along dim=0, but xs['a'] has 3 and xs['b'][0] has 4.",
    ),
    "dim out of range": (
        (add, H, {"a": XS}),
        {"dim": 2},
        ValueError,
        "scan: dim=2 is out of range for xs['a'], which is float32[3, 2] with 2 dimensions.",
    ),
    "negative dim out of range": (
        (add, H, XS),
        {"dim": -3},
        ValueError,
        "dim=-3 is out of range for xs",
    ),
    "scalar xs": (
        (add, H, torch.tensor(1.0)),
        {},
        ValueError,
        "dim=0 is out of range for xs, which is float32[]",
    ),
    "dim of another type": (
        (add, H, XS),
        {"dim": 1.0},
        TypeError,
        "scan: dim must be an int, but got float.",
    ),
    "string in init": (
        (add, {"h": H, "name": "x"}, XS),
        {},
        TypeError,
        "scan: init['name'] must be a tensor, a number or None, but got str. Close over other "
        "values instead of carrying them.",
    ),
    "string in a namedtuple": (
        (add, Pair(H, "x"), XS),
        {},
        TypeError,
        "init.second must be a tensor",
    ),
    "number in xs": (
        (add, H, {"a": XS, "k": 3.0}),
        {},
        TypeError,
        "scan: xs['k'] must be a tensor or None, but got float. Close over values that do not "
        "change from step to step.",
    ),
    "unroll zero": (
        (add, H, XS),
        {"unroll": 0},
        ValueError,
        "scan: unroll must be at least 1, but got 0.",
    ),
    "unroll of another type": (
        (add, H, XS),
        {"unroll": True},
        TypeError,
        "scan: unroll must be an int, but got bool.",
    ),
    "reverse of another type": (
        (add, H, XS),
        {"reverse": 1},
        TypeError,
        "scan: reverse must be True or False",
    ),
    **{
        f"Binomial of {number!r}": (
            (add, H, XS),
            {"checkpoint": Binomial(number)},
            TypeError,
            "scan: the snapshots and sweeps of a Binomial must be ints, but checkpoint is "
            f"Binomial({number!r}, 2).",
        )
        for number in ("a", True, 2.5)
    },
    "sweeps of another type": (
        (add, H, XS),
        {"checkpoint": Binomial(2, None)},
        TypeError,
        "but checkpoint is Binomial(2, None).",
    ),
    "unknown checkpoint": (
        (add, H, XS),
        {"checkpoint": "everything"},
        TypeError,
        "scan: checkpoint must be",
    ),
}

KEEP = "must keep its structure, shape and dtype from step to step"

# name -> (init, what the body returns, error, message)
BODIES = {
    "nothing": (
        H,
        lambda h, x: None,
        TypeError,
        "scan: combine_fn must return a pair (carry, y), but it returned None. Return (carry, None) if there is nothing to stack.",
    ),
    "one tensor": (
        H,
        lambda h, x: h + x,
        TypeError,
        "must return a pair (carry, y), but it returned float32[2]",
    ),
    "three values": (
        H,
        lambda h, x: (h, x, x),
        TypeError,
        "must return a pair (carry, y), but it returned a tuple of length 3",
    ),
    "another shape": (
        {"h": H},
        lambda c, x: ({"h": torch.ones(3)}, None),
        ValueError,
        f"scan: carry['h'] {KEEP}: expected float32[2] (from init), but combine_fn returned "
        "float32[3]. Give init the shape of the carry that combine_fn returns, or reshape what it returns.",
    ),
    "a broadcast shape": (
        torch.zeros(()),
        lambda c, x: (c[None] + x, None),
        ValueError,
        f"scan: carry {KEEP}: expected float32[]",
    ),
    "another dtype": (
        {"h": (H, H)},
        lambda c, x: ({"h": (c["h"][0], c["h"][1].double())}, None),
        TypeError,
        f"scan: carry['h'][1] {KEEP}: expected float32[2] (from init), but combine_fn returned "
        "float64[2]. Convert init with init.to(torch.float64), or the returned carry with "
        ".to(torch.float32).",
    ),
    "an int promoted": (
        torch.zeros(2, dtype=torch.int64),
        lambda c, x: (c + x, None),
        TypeError,
        "expected int64[2] (from init), but combine_fn returned float32[2]",
    ),
    "another container": (
        (H, H),
        lambda c, x: (mistakes.swapped(c), None),
        TypeError,
        f"scan: carry {KEEP}: expected a tuple (from init), but combine_fn returned list.",
    ),
    "another length": (
        (H, H),
        lambda c, x: ((c[0],), None),
        TypeError,
        "expected a tuple of length 2 (from init), but combine_fn returned length 1",
    ),
    "other keys": (
        {"h": H},
        lambda c, x: ({"c": x}, None),
        TypeError,
        "expected the keys ['h'] (from init), but combine_fn returned the keys ['c']",
    ),
    "a tensor for a dict": (
        {"h": H},
        lambda c, x: (x, None),
        TypeError,
        "expected a dict with keys ['h'] (from init), but combine_fn returned float32[2]",
    ),
    "None for a tensor": (
        (H, H),
        lambda c, x: ((c[0], None), None),
        TypeError,
        "carry[1] must keep",
    ),
    "a tensor for None": (
        (H, None),
        mistakes.in_turn,
        TypeError,
        "scan: carry[1] must keep its structure, shape and dtype from step to step: expected None (from init)",
    ),
    "a string in the carry": (
        H,
        lambda c, x: ("h", None),
        TypeError,
        "but combine_fn returned str",
    ),
    "a string in y": (
        H,
        lambda c, x: (c, {"a": "text"}),
        TypeError,
        "scan: y['a'] that combine_fn returns must be a tensor, a number or None, but is str.",
    ),
    "another device": (
        {"h": H.to("meta")},
        lambda c, x: ({"h": x + 0}, None),
        ValueError,
        "scan: carry['h'] must stay on one device from step to step: expected meta (from init), but "
        "combine_fn returned a tensor on cpu. Move init with init.to('cpu'), or the returned carry "
        "with .to('meta').",
    ),
    "a vector for a number": (
        0.0,
        lambda c, x: (torch.as_tensor(c)[None] + x, None),
        ValueError,
        "scan: carry must keep its structure, shape and dtype from step to step: expected a scalar tensor (from init), but combine_fn returned float32[2]",
    ),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments(case):
    args, options, error, message = ARGUMENTS[case]
    with pytest.raises(error) as caught:
        scan(*args, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize("case", BODIES)
def test_bodies(case):
    init, body, error, message = BODIES[case]
    with pytest.raises(error) as caught:
        scan(body, init, XS)
    assert message in str(caught.value)


#: what a first step may do to the carry, and each further one does again
GROWS = {"a broadcast shape", "another container", "a tensor for None", "a vector for a number"}


@pytest.mark.parametrize("case", [case for case in BODIES if case not in GROWS])
def test_bodies_with_no_step_to_run(case):
    init, body, error, message = BODIES[case]
    with pytest.raises(error) as caught:
        scan(body, init, XS[:0])
    assert message in str(caught.value)


@pytest.mark.parametrize("to", ["cpu", "meta"])
def test_a_carry_that_changes_its_device(to):
    """In the loop that a body falls back to, and in the operator itself, too."""
    init, xs = H.to("meta" if to == "cpu" else "cpu"), XS.to(to)

    def program(run):
        return lambda: run(lambda c, x: (x + 0, c.sum()), init, xs)

    def operator(combine_fn, init, xs):
        return torch.ops.higher_order.scan(combine_fn, [init], [xs], ())

    def watched(*args):
        with debug():
            return scan(*args)

    for run in (scan, watched, operator):
        with pytest.raises(ValueError, match="must stay on one device") as caught:
            program(run)()
        assert f"a tensor on {to}" in str(caught.value)


def test_leaves_on_two_devices():
    def body(h, x):
        return (h[0] + x, 3.0), h[0]

    (h, there), ys = scan(body, (H, torch.zeros((), device="meta")), XS)
    assert h.tolist() == [3, 3] and ys.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert there.device.type == "meta"


def chain(error):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@pytest.mark.torch_version
@pytest.mark.parametrize(
    "case",
    ["not callable", "negative length", "xs of different lengths", "string in init", "unroll zero"],
)
def test_arguments_under_compile(case):
    args, options, _error, message = ARGUMENTS[case]
    run = torch.compile(lambda: scan(*args, **options), backend="eager", fullgraph=True)
    with pytest.raises(Exception) as caught:
        run()
    assert any(
        type(e).__name__ in ("ScanTypeError", "ScanValueError")
        or message[:30] in str(e)
        or "Scan" in str(e)
        for e in chain(caught.value)
    )


@pytest.mark.torch_version
@pytest.mark.parametrize("case", ["nothing", "another shape", "another dtype", "other keys"])
def test_bodies_under_compile(case):
    init, body, error, _message = BODIES[case]
    run = torch.compile(lambda xs: scan(body, init, xs), backend="eager", fullgraph=True)
    with pytest.raises(Exception) as caught:
        run(XS)
    assert any(isinstance(e, error) or "Scan" in str(e) for e in chain(caught.value))


def test_inputs_are_intact_after_an_error():
    init, xs = torch.zeros(2), torch.ones(3, 2)

    def body(h, x):
        h.add_(x)
        x.zero_()
        return h[:1], None

    with pytest.raises(ValueError):
        scan(body, init, xs)
    assert not init.any() and xs.all()


@pytest.mark.parametrize(
    "number, error, message",
    [
        (np.float64(1), TypeError, "init must be .* got float64. Write float.value."),
        (2**64, ValueError, "init is an int of more than 64 bits, .*Carry a float"),
        (-(2**63) - 1, ValueError, "init is an int of more than 64 bits"),
    ],
)
def test_numbers_that_are_no_scalars(number, error, message):
    with pytest.raises(error, match=message):
        scan(add, number, XS)


def test_the_operator_asks_for_a_trip_count():
    with pytest.raises(ValueError, match="xs is empty, so there is no trip count"):
        torch.ops.higher_order.scan(lambda h: (h,), [H], [], ())
