"""What cannot be traced is said in words of the body, by its line: none of Dynamo's own."""

from __future__ import annotations

import copy
import itertools
import math
import random
import re
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from torch_scan_hop import NotTraceableError, fallback, scan
from torch_scan_hop.capture.reasons import reason_of

pytestmark = pytest.mark.torch_version


class State:
    def __init__(self, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)


def keeps_an_array(o: Any, x: Any) -> Any:
    o.k = o.k + 1
    return x * torch.from_numpy(o.k)


def keeps_a_scalar(o: Any, x: Any) -> Any:
    o.k = o.k * 0.5
    return x * float(o.k)


def counts_beyond(o: Any, x: Any) -> Any:
    o.k = o.k + 2**65
    return x


def divides_by_a_large_int(o: Any, x: Any) -> Any:
    o.k += 1
    return x * (o.k / 2**64)


def copies_a_sign(o: Any, x: Any) -> Any:
    o.k += 1
    return x * math.copysign(1, o.k)


def asks_if_whole(o: Any, x: Any) -> Any:
    o.k += 0.5
    return x * (2.0 if o.k.is_integer() else 1.0)


def repeats(o: Any, x: Any) -> Any:
    for _ in range(o.k):
        x = x * 0.5
    o.k += 1
    return x


def draws_by_numpy(o: Any, x: Any) -> Any:
    return x * float(np.random.rand())


def seeds(o: Any, x: Any) -> Any:
    torch.manual_seed(3)
    return x + torch.randn(3)


#: a body, what its state begins with, what is said
SAID: dict[str, tuple[Any, Any, str]] = {
    "array": (
        keeps_an_array,
        np.zeros(3, np.float32),
        "value of NumPy in attribute 'k'.*Keep a tensor",
    ),
    "NumPy scalar": (keeps_a_scalar, np.float64(1), "value of NumPy in attribute 'k'.*Keep a"),
    "counts": (counts_beyond, 0, "an int of more than 64 bits"),
    "divides": (divides_by_a_large_int, 0, "an int of more than 64 bits"),
    "sign": (copies_a_sign, 0, "gives torch another number"),
    "whole": (asks_if_whole, 0.0, r"is_integer\(\) of a number|decides by the value"),
    "repeats": (repeats, 0, r"range\(o.k\).*gives torch another number.*torch.where"),
    "numpy": (draws_by_numpy, 0, "draws from NumPy's random numbers.*Draw before the scan"),
    "seeds": (seeds, 0, "seeds random numbers.*Seed them before the scan"),
}


def rounds(o: Any, x: Any) -> Any:
    o.k *= 0.9
    return x * round(o.k, 2)


def drops(o: Any, x: Any) -> Any:
    o.k *= 0.9
    return torch.nn.functional.dropout(x, o.k)


def loads(o: Any, x: Any) -> Any:
    o.k.load_state_dict(o.k.state_dict())
    return o.k(x)


def draws(o: Any, x: Any) -> Any:
    return x * random.random()


def draws_and_decides(o: Any, x: Any) -> Any:
    return x * 2 if random.randint(0, 1) else x


def counts_values(o: Any, x: Any) -> Any:
    return x + torch.bincount(x.long(), minlength=3)


def one_hot(o: Any, x: Any) -> Any:
    return x + torch.nn.functional.one_hot(x.long()).sum()


def reads_a_complex_number(o: Any, x: Any) -> Any:
    return x * torch.complex(x, x)[0].item().real


def promotes(o: Any, x: Any) -> Any:
    return x.to(torch.result_type(o.k, x))


def forks(o: Any, x: Any) -> Any:
    with torch.random.fork_rng():
        return x + torch.randn(3)


def detects(o: Any, x: Any) -> Any:
    with torch.autograd.set_detect_anomaly(True):
        return x * 2


def steps_an_optimizer(o: Any, x: Any) -> Any:
    o.k.step()
    return x


def makes_an_optimizer(o: Any, x: Any) -> Any:
    torch.optim.SGD([x], 0.1)
    return x


def turns(o: Any, x: Any) -> Any:
    key, value = o.k.popitem(last=False)
    o.k[key] = value
    return x


def reads_a_bound(o: Any, x: Any) -> Any:
    return x + torch.histc(x, 3, 0, x.max().item())


_WEIGHT = torch.ones(3, requires_grad=True)
SAID |= {
    "random": (draws, 0, "draws from Python's `random`.*random.random.*Draw before the scan"),
    "randint": (draws_and_decides, 0, "draws from Python's `random`.*random.randint"),
    "loads": (loads, torch.nn.Linear(3, 3), r"for its state_dict\(\), at .*o.k.load.*a.copy_\(b\)"),
    "rounds": (rounds, 0.5, r"calls __round__.*round\(o.k, 2\).*torch.as_tensor\(d\), decimals=2"),
    "drops": (drops, 0.5, r"make to dropout\(\), at .*rand_like\(h\) < p"),
    "bincount": (counts_values, 0, "size .*bincount.*Count into as many places"),
    "one_hot": (one_hot, 0, "as many classes as.*num_classes=n"),
    "complex": (reads_a_complex_number, 0, "reads a complex number.*Keep it a tensor"),
    "result_type": (promotes, torch.ones(3), r"result_type.*promote_types\(h.dtype, x.dtype\)"),
    "fork_rng": (forks, 0, r"random numbers back.*fork_rng\(\):.*around the scan"),
    "anomaly": (detects, 0, "anomaly detection.*Enter it around the scan"),
    "optimizer": (
        steps_an_optimizer,
        torch.optim.SGD([_WEIGHT], 0.1),
        "optimizer of torch.optim.*Write the update out",
    ),
    "new optimizer": (makes_an_optimizer, 0, "optimizer of torch.optim.*Write the update out"),
    "turns": (
        turns,
        OrderedDict(a=torch.ones(3), b=torch.ones(3)),
        "keys, or their order|item 'a'",
    ),
    "histc": (reads_a_bound, 0, "gives a number that steps make to histc.*torch.where"),
}


def reads_on(o: Any, x: Any) -> Any:
    return x * next(o.k)


def makes_longer(o: Any, x: Any) -> Any:
    o.k = [*o.k, x]
    return x


def joins(o: Any, x: Any) -> Any:
    o.k = torch.cat([o.k, x[None]])
    return x


class Sum:
    def __init__(self, h: Any) -> None:
        self.h = h

    def __add__(self, other: Any) -> Any:
        return Sum(self.h + other)


class Items(dict[str, Any]):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


def copies(o: Any, x: Any) -> Any:
    o.k = copy.copy(o.k)
    o.k["h"] = o.k["h"] + x
    return o.k["h"] * 1


def trains_each_second_step(o: Any, x: Any) -> Any:
    o.k.train(o.k.n % 2 == 0)
    o.k.n += 1
    return o.k(x)


def views_without_grad(o: Any, x: Any) -> Any:
    with torch.no_grad():
        o.v = o.k[:2]
    o.k = o.k * x
    return x * 1


class ItemsRead(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]

    __setattr__ = dict.__setitem__


def adds_to_an_object(o: Any, x: Any) -> Any:
    o.k = o.k + x
    return o.k.h * 1


def keeps_items(o: Any, x: Any) -> Any:
    o.k.h = o.k.h + x
    return x * 2


def exchanges_modules(o: Any, x: Any) -> Any:
    y = o.k.now(x)
    o.k.now, o.k.next = o.k.next, o.k.now
    return y


_DROPOUT = torch.nn.Dropout()
_DROPOUT.n = 0
_MODULES = torch.nn.Module()
_MODULES.now, _MODULES.next = torch.nn.Tanh(), torch.nn.Sigmoid()
SAID |= {
    "adds": (adds_to_an_object, Sum(torch.ones(3)), r"no tensor.*o.k \+ x.*h.value \+ x"),
    "items": (keeps_items, Items(h=torch.ones(3)), "'h'.*__getattr__ from.*def __getattr__"),
    "items read": (
        keeps_items,
        ItemsRead(h=torch.ones(3)),
        "__setattr__ from.*o.k.h = .*def __get",
    ),
    "copies": (copies, {"h": torch.ones(3)}, r"copy.copy\(\) of a dict.*value.copy\(\)"),
    "trains": (trains_each_second_step, _DROPOUT, "'training'.*torch.where"),
    "views": (
        views_without_grad,
        torch.ones(3, requires_grad=True) * 1,
        r"'v'.*under no_grad\(\).*Leave a view of tensor.detach\(\)",
    ),
    "modules": (exchanges_modules, _MODULES, r"Tanh in attribute '\w+' of a module.*torch.where"),
}

ITERATORS = (
    itertools.count(),
    itertools.cycle([1.0]),
    iter([2.0] * 9),
    zip([1] * 9),
    (k for k in "a"),
)
SAID |= {
    f"reads from a {type(k).__name__}": (reads_on, k, "reads from an iterator.*in xs")
    for k in ITERATORS
}
LONGER = "attribute 'k'.*another size at each step.*appended to a list.*table"
SAID |= {"longer": (makes_longer, [], LONGER), "joins": (joins, torch.zeros(0, 3), LONGER)}

DYNAMOS = "Dynamo|VariableTracker|zuf0|u0|FakeTensor|fake tensor|unhinted|python_type"


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", SAID)
def test_what_is_not_traced_is_said_in_words_of_the_body(name: str, compiled: bool) -> None:
    torch._dynamo.reset()
    body, start, said = SAID[name]
    state = State(k=start)

    def cell(h: Any, x: Any) -> Any:
        y = body(state, x)
        return h + y, y

    run: Any = torch.compile(scan, backend="eager", fullgraph=True) if compiled else scan
    with fallback("error"), pytest.raises(Exception) as refused:
        run(cell, torch.zeros(3), torch.ones(20, 3))  # more than are traced one by one
    assert compiled or isinstance(refused.value, NotTraceableError)
    text = str(refused.value).splitlines()[0].partition("Python loop: ")
    text = text[2] or text[0]
    assert re.search(said, text) and "test_reason_words.py" in text, text
    assert not re.search(DYNAMOS, text), text


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("carried", [False, True])
def test_a_branch_before_anything_is_computed(carried: bool, compiled: bool) -> None:
    torch._dynamo.reset()

    def cell(h: Any, x: Any) -> Any:
        if h[0] if carried else x:
            return (h[0], h[1] + 1), x
        return (h[0], h[1] * 2), x

    run: Any = torch.compile(scan, backend="eager", fullgraph=True) if compiled else scan
    init = torch.tensor(True), torch.zeros(3)
    with fallback("error"), pytest.raises(Exception, match=r"(?s)decides by the value.*if h\[0\]"):
        run(cell, init, torch.tensor([True, False]))


def test_a_function_in_an_attribute_is_told_from_another() -> None:
    """What cannot be traced of one layer says nothing of another that is given other functions."""
    torch._dynamo.reset()

    def layer(function: Any) -> Any:
        kept = SimpleNamespace(function=function)
        return lambda h, x: (h + kept.function(x), x)

    h, xs = torch.zeros(3), torch.ones(4, 3)
    with fallback("error"):
        with pytest.raises(NotTraceableError, match="print"):
            scan(layer(lambda x: print(x)), h, xs)
        carry, _ = scan(layer(torch.nn.functional.relu), h, xs)
        with pytest.raises(NotTraceableError, match="seeds"):
            scan(layer(lambda x: x + torch.manual_seed(3).initial_seed()), h, xs)
    torch.testing.assert_close(carry, torch.full((3,), 4.0))


def test_a_reason_does_not_depend_on_where_torch_is_installed() -> None:
    """A long path made the explanation too long to be read, and the meaning was not found."""
    told = (
        "Attempted to call function marked as skipped\n"
        "  Explanation: Dynamo developers have intentionally marked that the function "
        "`manual_seed` in file `/{}/site-packages/torch/_compile.py` should not be traced."
    )
    for home in ("a", "a" * 200):
        assert "seeds random numbers" in reason_of(RuntimeError(told.format(home)))


def test_a_namespace_takes_nothing_from_dict() -> None:
    told = (
        "Unsupported method call\n"
        "  Explanation: Dynamo does not know how to trace method `__setattr__` of class `{}`"
    )
    assert "takes __setattr__ from dict" in reason_of(RuntimeError(told.format("AttrDict")))
    reason = reason_of(RuntimeError(told.format("SimpleNamespace")))
    assert "attribute of a SimpleNamespace" in reason and "a class of your own" in reason
