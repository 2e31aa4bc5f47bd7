"""Objects that a step makes anew for the next one: what is in them is carried.

Each function makes a program: a cell and what to look at afterwards. It is run in two calls as the
loop that a user writes, and as a scan; values, what is left and all gradients agree.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from typing import Any, Generic, NamedTuple, TypeVar

import pytest
import torch
import torch.utils._pytree as pytree
from oracle import assert_same, loop, written_loop
from torch import Tensor, nn

from torch_scan_hop import fallback, scan

pytestmark = pytest.mark.torch_version

F64 = torch.float64


@dataclasses.dataclass
class State:
    h: Tensor
    c: Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    h: Tensor
    steps: int = 0
    kind: str = "frozen"


class Plain:
    """Objects of it are made by more than assignments."""

    made = 0

    def __init__(self, h: Tensor, scale: float = 1.0):
        self.h = h * scale
        self.twice = self.h * 2

    @property
    def total(self) -> Tensor:
        return self.h.sum()

    def after(self, x: Tensor) -> Plain:
        return Plain(self.h + x, 0.5)


class Derived(Plain):
    def __init__(self, h: Tensor):
        super().__init__(h)
        self.inner = State(h + 1, h - 1)


T = TypeVar("T")


class Box(Generic[T]):
    def __init__(self, value: T):
        self.value = value


class Slots:
    __slots__ = ("h", "unset")

    def __init__(self, h: Tensor):
        self.h = h


@dataclasses.dataclass(slots=True)
class DataSlots:
    h: Tensor
    n: int = 0


class Guarded:
    """To assign an attribute is more than that."""

    def __init__(self, h: Tensor):
        self.h = h

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value * 1)


class Holder(nn.Module):
    def __init__(self, **state: Any):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3, dtype=F64))
        for name, value in state.items():
            setattr(self, name, value)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*(shape or (3,)), dtype=F64)


def a_dataclass():
    m = Holder(state=State(zeros(), zeros()))

    def cell(x):
        c = m.state.c + torch.tanh(m.state.h @ m.w + x)
        m.state = State(torch.tanh(c), c)
        return m.state.h

    return m, cell, lambda: [m.state.h, m.state.c]


def a_dataclass_replaced():
    m = Holder(state=State(zeros(), zeros()))

    def cell(x):
        m.state = dataclasses.replace(m.state, h=torch.tanh(m.state.h @ m.w + x))
        return m.state.h + m.state.c

    return m, cell, lambda: [m.state.h, m.state.c]


def frozen_with_a_number_and_a_word():
    m = Holder(state=Frozen(zeros()))

    def cell(x):
        was = m.state
        m.state = Frozen(torch.tanh(was.h @ m.w + x * was.steps), was.steps + 1, was.kind)
        return m.state.h

    return m, cell, lambda: [m.state.h, m.state.steps, len(m.state.kind)]


def none_at_first():
    m = Holder(state=None)

    def cell(x):
        h = x if m.state is None else torch.tanh(m.state.h @ m.w + x)
        m.state = State(h, h * 2)
        return m.state.c

    return m, cell, lambda: [m.state.h, m.state.c]


def a_flag_that_the_first_step_sets():
    m = Holder(state=Frozen(zeros(), kind="new"))

    def cell(x):
        h = x if m.state.kind == "new" else torch.tanh(m.state.h @ m.w + x)
        m.state = Frozen(h, m.state.steps + 1, "old")
        return h

    return m, cell, lambda: [m.state.h, m.state.steps, len(m.state.kind)]


def smaller_at_first():
    m = Holder(state=State(zeros(1), 0.0))

    def cell(x):
        h = torch.tanh(m.state.h + x) @ m.w
        m.state = State(h, m.state.c + h.sum())
        return m.state.c * 1

    return m, cell, lambda: [m.state.h, m.state.c]


def a_class_with_methods():
    m = Holder(state=Plain(zeros()))

    def cell(x):
        m.state = m.state.after(torch.tanh(x @ m.w))
        return m.state.total + m.state.twice

    return m, cell, lambda: [m.state.h, m.state.twice]


def an_object_in_an_object():
    m = Holder(state=Derived(zeros()))

    def cell(x):
        m.state = Derived(torch.tanh(m.state.inner.h @ m.w + x) + m.state.inner.c)
        return m.state.total

    return m, cell, lambda: [m.state.h, m.state.inner.h, m.state.inner.c, m.state.twice]


def objects_in_containers():
    m = Holder(a=[State(zeros(), zeros())] * 2, b={"x": (zeros(), Frozen(zeros()))})

    def cell(x):
        one, two = m.a
        m.a = [State(two.h + x, one.c), State(torch.tanh(one.h @ m.w), two.c + x)]
        old, frozen = m.b["x"]
        m.b = {"x": (frozen.h * 2, Frozen(old + x @ m.w, frozen.steps + 2))}
        return m.a[0].h + m.b["x"][0]

    return m, cell, lambda: [m.a[1].h, m.a[0].c, m.b["x"][1].h, m.b["x"][1].steps]


def an_item_of_a_dict():
    memory: dict[str, Any] = {"lstm": State(zeros(), zeros())}
    m = Holder()

    def cell(x):
        h = torch.tanh(memory["lstm"].h @ m.w + x)
        memory["lstm"] = State(h, memory["lstm"].c + h)
        return h

    return m, cell, lambda: [memory["lstm"].h, memory["lstm"].c]


def objects_in_a_list_that_stays():
    m = Holder()
    states = [State(zeros(), zeros()) for _ in range(2)]

    def cell(x):
        for k in range(2):
            x = torch.tanh(states[k].h @ m.w + x)
            states[k] = State(x, states[k].c + 1)
        return x

    return m, cell, lambda: [s.h for s in states] + [s.c for s in states]


def changed_after_it_is_made():
    m = Holder(state=State(zeros(), zeros()))

    def cell(x):
        m.state = State(torch.tanh(m.state.h @ m.w), m.state.c)
        m.state.h = m.state.h + x
        m.state.c += 1.0
        return m.state.h

    return m, cell, lambda: [m.state.h, m.state.c]


def a_copy():
    m = Holder(state=State(zeros(), zeros()))

    def cell(x):
        state = copy.copy(m.state)
        state.h = torch.tanh(state.h @ m.w + x)
        m.state = state
        return state.h

    return m, cell, lambda: [m.state.h, m.state.c]


def a_stash():
    """What no step reads is the last step's."""
    m = Holder(seen=None, h=zeros())

    def cell(x):
        m.h = torch.tanh(m.h @ m.w + x)
        m.seen = Box(m.h * 2)
        return m.h

    return m, cell, lambda: [m.seen.value, m.h]


def a_distribution():
    m = Holder(prior=torch.distributions.Normal(zeros(), zeros() + 1, validate_args=False))

    def cell(x):
        mean = torch.tanh(m.prior.mean @ m.w + x)
        now = torch.distributions.Normal(mean, m.prior.stddev * 0.9, validate_args=False)
        kl = torch.distributions.kl_divergence(now, m.prior)
        m.prior = now
        return kl

    return m, cell, lambda: [m.prior.mean, m.prior.stddev]


class Attributes(dict):
    """The items of a dict, by the names of attributes."""

    def __getattr__(self, name):
        return self[name]


def a_dict_of_a_class_of_its_own():
    m = Holder(state=Attributes(h=zeros(), n=1))

    def cell(x):
        m.state = Attributes(h=torch.tanh(m.state.h @ m.w + x * m.state.n), n=m.state.n + 1)
        return m.state.h

    return m, cell, lambda: [m.state.h, m.state.n]


def given_on_to_a_second_state():
    m = Holder(now=State(zeros(), zeros()), before=State(zeros(), zeros() + 3))

    def cell(x):
        h = torch.tanh(m.now.h @ m.w + x) - m.before.c
        m.before = m.now
        m.now = State(h, h + 1)
        return h

    return m, cell, lambda: [m.now.h, m.before.h, m.before.c]


def flags_and_words_in_containers():
    m = Holder(
        a=(zeros(), True, "tanh"), b={"mode": "train", "h": zeros(), "old": [zeros(), False]}
    )

    def cell(x):
        h, is_tanh, word = m.a
        h = torch.tanh(h @ m.w + x) if is_tanh and word == "tanh" else h
        m.a = (h, is_tanh, word)
        m.b = {"mode": m.b["mode"], "h": m.b["old"][0] + h, "old": [h, m.b["old"][1]]}
        return m.b["h"]

    return m, cell, lambda: [m.a[0], int(m.a[1]), len(m.a[2]), m.b["h"], m.b["old"][0], len(m.b)]


def a_flag_in_a_tuple_that_the_first_step_sets():
    m = Holder(state=(zeros(), False))

    def cell(x):
        h, seen = m.state
        m.state = (torch.tanh(h @ m.w + x) if seen else x * 2, True)
        return m.state[0]

    return m, cell, lambda: [m.state[0], int(m.state[1])]


class Pair(NamedTuple):
    state: Any
    h: Tensor


def in_a_named_tuple():
    m = Holder(pair=Pair(Box(zeros()), zeros()))

    def cell(x):
        m.pair = Pair(Box(m.pair.h + x @ m.w), m.pair.state.value * 2)
        return m.pair.h

    return m, cell, lambda: [m.pair.state.value, m.pair.h]


def what_the_program_begins_with():
    empty = State(zeros(), zeros())
    m = Holder(state=empty, items=[zeros()])
    m.first = m.items

    def cell(x):
        h = x * 3 if m.state is empty else torch.tanh(m.state.h @ m.w + x)
        m.state = State(h, x)
        h = h if m.items is m.first else h + m.items[0]
        m.items = [h]
        return h

    return m, cell, lambda: [m.state.h, m.items[0]]


def two_names_of_what_is_changed():
    m = Holder(a=State(zeros(), zeros()), b=State(zeros(), zeros()))

    def cell(x):
        m.b.h = m.b.h + 1
        y = torch.tanh(m.a.h @ m.w + x)
        m.a = m.b = State(y, x)
        return y

    return m, cell, lambda: [m.a.h, m.b.h]


def changed_and_then_replaced():
    """The first step changes the object from before the scan, which others have."""
    first = State(zeros(), zeros())
    m = Holder(state=first)

    def cell(x):
        m.state.h = torch.tanh(m.state.h @ m.w + x)
        m.state = State(m.state.h, x)
        return m.state.h

    return m, cell, lambda: [m.state.h, m.state.c, first.h, first.c]


def a_dict_changed_and_then_replaced():
    first = {"h": zeros()}
    m = Holder(state=first)

    def cell(x):
        m.state["h"] = torch.tanh(m.state["h"] @ m.w + x)
        m.state = {"h": m.state["h"] * 2}
        return m.state["h"]

    return m, cell, lambda: [m.state["h"], first["h"]]


def a_list_within_changed_and_then_replaced():
    first = Box([zeros()])
    m = Holder(state=first)

    def cell(x):
        m.state.value[0] = torch.tanh(m.state.value[0] @ m.w + x)
        m.state = Box([m.state.value[0] * 2])
        return m.state.value[0]

    return m, cell, lambda: [m.state.value[0], first.value[0]]


def an_object_that_is_kept():
    kept: list[Any] = []
    m = Holder(state=State(zeros(), zeros()))

    def cell(x):
        m.state = State(torch.tanh(m.state.h @ m.w + x), x)
        kept.append(m.state)
        m.state.c = m.state.c + 1
        return m.state.h

    return m, cell, lambda: [m.state.h, *(s.h for s in kept), *(s.c for s in kept)]


def changed_in_the_next_step_when_kept():
    kept: list[Any] = []
    m = Holder(state=State(zeros(), zeros()))

    def cell(x):
        m.state.c = m.state.c + 1
        m.state = State(torch.tanh(m.state.h @ m.w + x), x)
        kept.append(m.state)
        return m.state.h

    return m, cell, lambda: [m.state.h, *(s.h for s in kept), *(s.c for s in kept)]


def another_object_of_the_program():
    m = Holder(a=State(zeros(), zeros()), b=State(zeros() + 1, zeros()))

    def cell(x):
        m.a, m.b = m.b, m.a
        m.a.h = torch.tanh(m.b.h @ m.w + x)
        return m.a.h

    return m, cell, lambda: [m.a.h, m.b.h]


def another_class_each_second_step():
    m = Holder(state=Box(zeros()))

    def cell(x):
        if isinstance(m.state, Box):
            m.state = Plain(torch.tanh(m.state.value @ m.w + x))
            return m.state.h
        m.state = Box(m.state.h + x)
        return m.state.value

    return m, cell, lambda: [x for x in vars(m.state).values()]


def a_flag_that_turns():
    m = Holder(state=Frozen(zeros(), kind="a"))

    def cell(x):
        h = m.state.h * 2 if m.state.kind == "a" else torch.tanh(m.state.h @ m.w + x)
        m.state = Frozen(h, 0, "b" if m.state.kind == "a" else "a")
        return h

    return m, cell, lambda: [m.state.h, len(m.state.kind)]


def slots():
    m = Holder(state=Slots(zeros()), other=DataSlots(zeros()))

    def cell(x):
        m.state = Slots(torch.tanh(m.state.h @ m.w + x))
        m.other = DataSlots(m.other.h + m.state.h, m.other.n + 1)
        return m.state.h

    return m, cell, lambda: [m.state.h, m.other.h, m.other.n]


def one_object_with_slots_under_two_names():
    m = Holder(a=DataSlots(zeros()), b=DataSlots(zeros() + 1))

    def cell(x):
        m.b.h = m.b.h + 1
        y = torch.tanh(m.a.h @ m.w + x)
        m.a = m.b = DataSlots(y)
        return y

    return m, cell, lambda: [m.a.h, m.b.h]


def assignments_that_are_more():
    m = Holder(state=Guarded(zeros()))

    def cell(x):
        m.state = Guarded(torch.tanh(m.state.h @ m.w + x))
        return m.state.h

    return m, cell, lambda: [m.state.h]


def one_object_under_two_names():
    m = Holder(now=State(zeros(), zeros()), last=State(zeros(), zeros()))

    def cell(x):
        scale = 1.0 if m.now is m.last else 2.0
        m.now = m.last = State(torch.tanh(m.now.h @ m.w + x) * scale, x)
        return m.now.h

    return m, cell, lambda: [m.now.h, m.last.c]


def one_dict_under_two_names():
    m = Holder(now={"h": zeros()}, last={"h": zeros()})

    def cell(x):
        scale = 1.0 if m.now is not m.last else 2.0
        m.now = m.last = {"h": torch.tanh(m.now["h"] @ m.w + x) * scale}
        return m.now["h"]

    return m, cell, lambda: [m.now["h"]]


def a_tuple_of_the_last_ones():
    m = Holder(state=())

    def cell(x):
        m.state = (*m.state[-1:], torch.tanh(x @ m.w + sum(m.state)))
        return sum(m.state)

    return m, cell, lambda: [*m.state, len(m.state)]


def an_item_that_the_first_step_takes():
    m = Holder(state={"h": zeros(), "init": zeros() + 1, "n": 0})

    def cell(x):
        init = m.state.pop("init", None)
        h = torch.tanh((m.state["h"] if init is None else init) @ m.w + x)
        m.state.update(h=h, n=m.state["n"] + 1)
        return h

    return m, cell, lambda: [m.state["h"], m.state["n"], len(m.state)]


def a_named_tuple_with_an_object_and_a_flag():
    m = Holder(state=Marked(State(zeros(), zeros()), True))

    def cell(x):
        h = torch.tanh(m.state.inner.h @ m.w + x)
        m.state = Marked(State(h, m.state.inner.c + h), m.state.on)
        return m.state.inner.c

    return m, cell, lambda: [m.state.inner.h, m.state.inner.c, m.state.on]


class Marked(NamedTuple):
    inner: State
    on: bool


CAPTURED = [
    a_tuple_of_the_last_ones,
    an_item_that_the_first_step_takes,
    a_named_tuple_with_an_object_and_a_flag,
    in_a_named_tuple,
    a_dataclass,
    a_dataclass_replaced,
    frozen_with_a_number_and_a_word,
    none_at_first,
    a_flag_that_the_first_step_sets,
    smaller_at_first,
    a_class_with_methods,
    an_object_in_an_object,
    objects_in_containers,
    an_item_of_a_dict,
    objects_in_a_list_that_stays,
    changed_after_it_is_made,
    a_stash,
    a_distribution,
    slots,
    given_on_to_a_second_state,
    flags_and_words_in_containers,
    a_flag_in_a_tuple_that_the_first_step_sets,
]


def optimised(state, of):
    """Return what steps leave if an optimiser writes to a parameter that is in it."""

    def outcome(run):
        torch.manual_seed(0)
        m, outs = Holder(), []
        m.state = state(zeros(), m.w)
        optimiser = torch.optim.SGD(m.parameters(), 0.1)
        for _ in range(3):

            def cell(c, x):
                h, w = of(m)
                h = torch.tanh(h @ w + x)
                m.state = state(h, w)
                return c, h

            _, ys = run(cell, zeros(), torch.randn(4, 3, dtype=F64))
            optimiser.zero_grad()
            ys.square().sum().backward()
            optimiser.step()
            h, w = of(m)
            m.state = state(h.detach(), w)
            outs += [ys.detach(), m.w.detach().clone(), w.detach().clone()]
            assert w is m.w
        return outs

    return outcome


@pytest.mark.parametrize(
    "state, of",
    [
        (lambda h, w: (h, w), lambda m: m.state),
        (lambda h, w: {"h": h, "w": w}, lambda m: m.state.values()),
        (State, lambda m: (m.state.h, m.state.c)),
        (lambda h, w: [(h, w)], lambda m: (m.state[0][0], m.w)),
    ],
    ids=["tuple", "dict", "object", "from elsewhere"],
)
def test_parameters_within_state_stay_the_programs(state, of):
    """A copy was left, in which no later call found what an optimiser had written."""
    outcome = optimised(state, of)
    with fallback("error"):
        assert_same(outcome(scan), outcome(written_loop))


def test_one_object_left_under_two_names():
    m = Holder(now=State(zeros(), zeros()), last=None, log={"now": None})

    def cell(c, x):
        m.now = m.last = m.log["now"] = State(torch.tanh(m.now.h @ m.w + x), x)
        return c, x

    with fallback("error"):
        scan(cell, zeros(), torch.randn(4, 3, dtype=F64))
    assert m.now is m.last
    assert m.now is m.log["now"]


def an_object_that_holds_itself():
    m = Holder(state=Box(zeros()))
    m.state.again = m.state

    def cell(x):
        m.state = Box(torch.tanh(m.state.again.value @ m.w + x))
        m.state.again = m.state
        return m.state.value

    return m, cell, lambda: [m.state.again.value]


OTHERS = [
    an_object_that_holds_itself,
    two_names_of_what_is_changed,
    changed_and_then_replaced,
    a_dict_changed_and_then_replaced,
    a_list_within_changed_and_then_replaced,
    an_object_that_is_kept,
    changed_in_the_next_step_when_kept,
    another_object_of_the_program,
    another_class_each_second_step,
    a_flag_that_turns,
    assignments_that_are_more,
    one_object_with_slots_under_two_names,
    one_object_under_two_names,
    one_dict_under_two_names,
]

# torch 2.9 traces no copy.copy, no ``is`` between lists, and not what else a dict holds
NEWER = [a_copy, a_dict_of_a_class_of_its_own, what_the_program_begins_with]
(CAPTURED if torch.__version__ >= "2.13" else OTHERS).extend(NEWER)


def outcome(make, run):
    """Return ys, what is left and gradients after each of two calls."""
    torch.manual_seed(0)
    module, cell, state = make()
    found: list[Any] = []
    for _ in range(2):
        xs = torch.randn(4, 3, dtype=F64, requires_grad=True)
        _, ys = run(lambda c, x: (c, cell(x)), None, xs)
        left = [ys, *state()]
        total = sum((v * v).sum() for v in left if isinstance(v, Tensor) and v.requires_grad)
        given = pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, left)
        given += torch.autograd.grad(total, [xs, module.w], retain_graph=True)
        found += [torch.as_tensor(v) for v in given]
    return found


def compiled(cell, init, xs):
    run = torch.compile(lambda xs: scan(cell, init, xs), backend="aot_eager", fullgraph=True)
    return run(xs)


WAYS = {"eager": scan, "compiled": compiled}


@pytest.mark.works("state in attributes, hooks, a first step that differs")
@pytest.mark.parametrize("way", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", CAPTURED, ids=lambda make: make.__name__)
def test_captured(make, way) -> None:
    with fallback("error"):
        assert_same(outcome(make, WAYS[way]), outcome(make, written_loop))


@pytest.mark.filterwarnings("ignore:torch_scan_hop")
@pytest.mark.parametrize("make", OTHERS, ids=lambda make: make.__name__)
def test_as_the_loop_if_not_captured(make) -> None:
    assert_same(outcome(make, scan), outcome(make, written_loop))


class Items(list):
    pass


OF_CLASSES = {
    "dict": lambda h, n: Attributes(h=h, n=n),
    "list": lambda h, n: Items([h, n]),
    "UserDict": lambda h, n: collections.UserDict(h=h, n=n),
    "Counter": lambda h, n: collections.Counter(h=h, n=n),
}


def _captured_where_it_can_be(of):
    """Torch 2.9 does not trace what else such a dict holds."""
    is_loop = torch.__version__ < "2.10" and of in ("dict", "Counter")
    return fallback("allow" if is_loop else "error")


@pytest.mark.parametrize("way", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("of", OF_CLASSES)
def test_dicts_and_lists_of_other_classes(of, way) -> None:
    """In init, as the carry and as ys."""
    make = OF_CLASSES[of]
    w = torch.randn(3, 3, dtype=F64, requires_grad=True)

    def cell(state, x):
        h, n = state.values() if hasattr(state, "values") else state
        h = torch.tanh(h @ w + x)
        return make(h, n + 1), make(h * 2, n)

    def outputs(run):
        carry, ys = run(cell, make(zeros(), zeros()), xs)
        parts = [*carry.values(), *ys.values()] if hasattr(ys, "values") else [*carry, *ys]
        return type(carry), type(ys), parts, torch.autograd.grad(sum(p.sum() for p in parts), w)

    if torch.__version__ < "2.10" and of in ("dict", "Counter") and way == "compiled":
        pytest.skip("it is a loop, which torch.compile does not run")
    xs = torch.randn(4, 3, dtype=F64)
    with _captured_where_it_can_be(of):
        found = outputs(WAYS[way])
    expected = outputs(loop)
    assert found[:2] == expected[:2] == (type(make(0, 0)),) * 2
    assert_same(found[2:], expected[2:])


class NotOfADict(dict):
    def __init__(self, h):
        super().__init__(h=h)


def with_an_attribute(h):
    made = Attributes(h=h)
    made.seen = True
    return made


@pytest.mark.filterwarnings("ignore:torch_scan_hop")
@pytest.mark.parametrize("make", [NotOfADict, with_an_attribute])
def test_a_dict_that_is_more_than_its_items_is_refused(make) -> None:
    with pytest.raises(TypeError, match=r"more than its items.*register_pytree_node"):
        scan(lambda c, x: (make(c["h"] + x), x), make(zeros()), torch.randn(4, 3, dtype=F64))


@dataclasses.dataclass
class Counted:
    """Its fields are not in the order of their names."""

    total: Tensor
    steps: int
    at: float


@pytest.mark.parametrize("way", WAYS)
def test_numbers_in_a_dataclass_that_is_carried(way) -> None:
    def cell(state, x):
        total = state.total + x * state.steps - state.at
        return Counted(total, state.steps + 1, state.at * 0.5), Counted(total, 1, 2.0).total

    xs, init = torch.randn(4, 3, dtype=F64), Counted(zeros(), 3, 1.0)
    (carry, ys), (last, rows) = WAYS[way](cell, init, xs), written_loop(cell, init, xs)
    assert_same((ys, carry.total), (rows, last.total))
    assert type(carry) is Counted and (int(carry.steps), float(carry.at)) == (7, 0.0625)
