"""Programs as people write them: facts about a carry, first steps, hooks, state in attributes.

Each function makes one: ``Program(cell, init, xs, leaves, state)``, made anew for each way to run
it. ``leaves`` are what gradients are taken of, and ``state()`` what the program leaves in objects.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torch_scan_hop import scan

F64 = torch.float64


class Program(NamedTuple):
    cell: Callable[[Any, Any], tuple[Any, Any]]
    init: Any
    xs: Any
    leaves: list[Tensor]
    state: Callable[[], list[Any]] = list


PROGRAMS: dict[str, Callable[[], Program]] = {}


def program(make: Callable[[], Program]) -> Callable[[], Program]:
    PROGRAMS[make.__name__] = make
    return make


def weight(*shape: int) -> Tensor:
    return torch.randn(*(shape or (4, 4)), dtype=F64, requires_grad=True)


def steps() -> Tensor:
    return torch.randn(5, 4, dtype=F64)


def zeros() -> Tensor:
    return torch.zeros(4, dtype=F64)


def tanh_cell(w: Tensor, before: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A tanh cell that does something to its carry first."""

    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(before(h) @ w + x)
        return h, h

    return cell


# --- what Python asks of a carry ---


@program
def detaches_what_requires_grad() -> Program:
    w = weight()
    cell = tanh_cell(w, lambda h: h.detach() if h.requires_grad else h)
    return Program(cell, zeros(), steps(), [w])


@program
def doubles_a_leaf() -> Program:
    w = weight()
    cell = tanh_cell(w, lambda h: h * 2 if h.is_leaf else h)
    return Program(cell, torch.randn(4, dtype=F64), steps(), [w])


@program
def doubles_a_leaf_that_requires_grad() -> Program:
    w, h0 = weight(), weight(4)
    cell = tanh_cell(w, lambda h: h * 2 if h.is_leaf else h)
    return Program(cell, h0, steps(), [w, h0])


@program
def knows_its_init() -> Program:
    w, h0 = weight(), torch.randn(4, dtype=F64)
    return Program(tanh_cell(w, lambda h: h * 2 if h is h0 else h), h0, steps(), [w])


@program
def knows_a_parameter() -> Program:
    w, h0 = weight(), nn.Parameter(torch.randn(4, dtype=F64))
    cell = tanh_cell(w, lambda h: h * 2 if isinstance(h, nn.Parameter) else h)
    return Program(cell, h0, steps(), [w, h0])


@program
def reads_grad_of_init() -> Program:
    w, h0 = weight(), weight(4)
    h0.grad = torch.zeros(4, dtype=F64)
    cell = tanh_cell(w, lambda h: h * 2 if h.is_leaf and h.grad is not None else h)
    return Program(cell, h0, steps(), [w])


@program
def reads_an_attribute_of_init() -> Program:
    w, h0 = weight(), torch.randn(4, dtype=F64)
    h0.tag = 3.0  # type: ignore[attr-defined]
    return Program(tanh_cell(w, lambda h: h * getattr(h, "tag", 1.0)), h0, steps(), [w])


@program
def requires_grad_one_step_after_another() -> Program:
    w = weight()

    def cell(carry: Any, x: Tensor) -> Any:
        a, b = carry
        after = b.detach() if b.requires_grad else b * 3
        return (torch.tanh(a @ w + x), torch.tanh(after + a)), b

    return Program(cell, (zeros(), torch.randn(4, dtype=F64)), steps(), [w])


@program
def averages_what_requires_grad() -> Program:
    """Its average requires grad after the first step, and then no more."""
    module = KeepsH()

    def cell(h: Tensor, x: Tensor) -> Any:
        z = module.layer(h) + x
        with torch.no_grad():
            module.h = z if module.h is None else 0.9 * module.h + 0.1 * z
        h = torch.tanh(z - module.h)
        return h, h

    return Program(cell, zeros(), steps(), list(module.parameters()), lambda: [module.h])


# --- a first step that differs ---


@program
def none_at_first() -> Program:
    w = weight()

    def cell(carry: Any, x: Tensor) -> Any:
        h, before = carry
        h = torch.tanh(h @ w + x) if before is None else torch.tanh(h @ w + x) + before
        return (h, x), h

    return Program(cell, (zeros(), None), steps(), [w])


@program
def two_steps_of_none() -> Program:
    w = weight()

    def cell(carry: Any, x: Tensor) -> Any:
        one, two = carry
        y = x @ w
        y = y if one is None else y + one
        y = y if two is None else y - two
        return (y, one), y

    return Program(cell, (None, None), steps(), [w])


@program
def zero_at_first() -> Program:
    w = weight()
    return Program(lambda a, x: (x @ w + 0.9 * a,) * 2, 0, steps(), [w])


@program
def broadcast_at_first() -> Program:
    w = weight()
    return Program(lambda a, x: (x @ w + 0.9 * a,) * 2, torch.ones(1, dtype=F64), steps(), [w])


@program
def a_list_and_then_tuples() -> Program:
    w = weight()

    def cell(carry: Any, x: Tensor) -> Any:
        a, b = carry
        return (torch.tanh(a @ w + x), a), b

    return Program(cell, [zeros(), zeros()], steps(), [w])


@program
def an_empty_dict_at_first() -> Program:
    w = weight()

    def cell(carry: Any, x: Tensor) -> Any:
        h = torch.tanh(x @ w + carry.get("h", torch.zeros_like(x)))
        return {"h": h}, h

    return Program(cell, {}, steps(), [w])


@program
def writes_to_its_carry_at_first() -> Program:
    w, h0 = weight(), torch.ones(4, dtype=F64)

    def cell(carry: Any, x: Tensor) -> Any:
        h, before = carry
        h = h.clone() if before is not None else h.mul_(1.0)
        h = torch.tanh(h @ w + x)
        return (h.clone(), x), h

    return Program(cell, (h0, None), steps(), [w], lambda: [h0])


def _numbers(dtype: torch.dtype, one: Any) -> Program:
    xs = torch.randn(5).to(dtype) if dtype.is_floating_point else torch.arange(5, dtype=dtype)

    def cell(c: Any, x: Tensor) -> Any:
        return (c[0] + x, c[1] + c[0]), c[1] + x

    return Program(cell, (one, one), xs, [])


@program
def numbers_that_become_bfloat16() -> Program:
    return _numbers(torch.bfloat16, 0.0)


@program
def numbers_that_become_float16() -> Program:
    return _numbers(torch.float16, 0.0)


@program
def numbers_that_become_int8() -> Program:
    return _numbers(torch.int8, 0)


@program
def adam_that_counts_its_steps() -> Program:
    w = weight()

    def cell(carry: Any, x: Tensor) -> Any:
        p, m, v, n = carry
        g = p @ w - x
        n = n + 1
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        p = p - 0.1 * (m / (1 - 0.9**n)) / ((v / (1 - 0.999**n)).sqrt() + 1e-8)
        return (p, m, v, n), p

    return Program(cell, (zeros(), zeros(), zeros(), 0), steps(), [w])


@program
def a_number_under_two_names() -> Program:
    w = weight()

    def cell(carry: Any, x: Tensor) -> Any:
        h, n = carry
        twice = n
        twice *= 2
        twice += 1
        return (torch.tanh(h @ w + x / twice), n), h * n

    return Program(cell, (zeros(), 3), steps(), [w])


@program
def numbers_made_of_a_number() -> Program:
    w = weight()

    def cell(carry: Any, x: Tensor) -> Any:
        h, n = carry
        h = torch.tanh(h @ w + x * (0.7 / (n + 1) ** 0.5)) * (-n // 2 + 0.1 * (n % 3))
        return (h, n + 1), h * (n > 2) + abs(1 - n / 3)

    return Program(cell, (zeros(), 0), steps(), [w])


@program
def schedules_of_a_counter() -> Program:
    """Python's functions of numbers, whose results are attributes, too."""
    module = KeepsH()
    module.n, module.temperature, module.rate = 0, 1, 0.1

    def cell(h: Tensor, x: Tensor) -> Any:
        warm = min(1.0, module.n / 3)
        h = torch.tanh(module.layer(h) / module.temperature + x * warm + module.rate)
        module.n += 1
        module.temperature = max(0.5, 1 / (1 + module.n / 7))
        module.rate = 0.05 * (1 + math.cos(math.pi * module.n / 20)) + 0.3 * (module.n > 2)
        return h, h + round(module.n / 2) + (1e-9 * h.detach() == 1e-9 / module.n)

    def state() -> list[Any]:
        return [module.n, module.temperature, module.rate]

    return Program(cell, zeros(), steps(), list(module.parameters()), state)


@program
def truths_that_are_summed() -> Program:
    def cell(c: Any, x: Tensor) -> Any:
        return (c[0] + x, c[1] + c[0]), c[1] + x

    return Program(cell, (True, True), torch.tensor([True, False, True]), [])


@program
def half_before_integers() -> Program:
    return Program(lambda c, x: (x, c + x), 0.5, torch.arange(5), [])


@program
def asks_if_its_carry_is_a_tensor() -> Program:
    w = weight()

    def cell(h: Any, x: Tensor) -> Any:
        h = torch.tanh(h @ w + x) if isinstance(h, Tensor) else torch.tanh(x)
        return h, h

    return Program(cell, 0.0, steps(), [w])


@program
def true_at_first() -> Program:
    w = weight()

    def cell(carry: Any, x: Tensor) -> Any:
        h, is_first = carry
        h = torch.tanh(x @ w) if is_first is True else torch.tanh(h @ w + x)
        return (h, h.sum() > 9), h

    return Program(cell, (zeros(), True), steps(), [w])


# --- hooks ---


@program
def hook_of_the_carry_alone() -> Program:
    w = weight()

    def cell(h: Tensor, x: Tensor) -> Any:
        if h.requires_grad:
            h.register_hook(lambda g: g * 0.5)
        return torch.tanh(h @ w + x), x * 2

    return Program(cell, zeros(), steps(), [w])


@program
def hook_of_a_cloned_carry() -> Program:
    w = weight()

    def cell(h: Tensor, x: Tensor) -> Any:
        if h.requires_grad:
            h.register_hook(lambda g: torch.clamp(g, -0.1, 0.1) * w.detach().mean())
        h = torch.tanh(h @ w + x)
        return h.clone(), h

    return Program(cell, zeros(), steps(), [w])


def _hooks_its_carry(f: Callable[[Tensor], Tensor], *hooks: Callable[..., Tensor]) -> Program:
    """Of a carry that the step before has used in y, too, and changed in place."""
    w = weight()

    def cell(h: Tensor, x: Tensor) -> Any:
        for hook in hooks:
            if h.requires_grad:
                h.register_hook(lambda g, hook=hook: hook(g, w.detach()))
        h = torch.sin(h @ w + x).mul_(1.5)
        return h, f(h)

    return Program(cell, zeros(), steps(), [w])


@program
def hook_of_a_carry_that_is_a_y() -> Program:
    return _hooks_its_carry(lambda h: h, lambda g, w: g * 0.5)


@program
def two_hooks_of_a_carry_that_a_y_is_made_of() -> Program:
    clamp = lambda g, w: g.clamp(-0.1, 0.1) * w.mean()  # noqa: E731
    return _hooks_its_carry(torch.sin, lambda g, w: g.tanh() * 2, clamp)


@program
def hook_of_the_cell_state_of_an_lstm() -> Program:
    """Torch makes h of c, within one operator."""
    layer = nn.LSTMCell(4, 4).double()

    def cell(carry: Any, x: Tensor) -> Any:
        if carry[1].requires_grad:
            carry[1].register_hook(lambda g: g.clamp(-0.05, 0.05))
        h, c = layer(x, carry)
        return (h, c), h

    return Program(cell, (zeros(), zeros()), steps(), list(layer.parameters()))


@program
def hook_of_a_carry_that_is_two_carries() -> Program:
    w = weight()

    def cell(carry: Any, x: Tensor) -> Any:
        h, same = carry
        if h.requires_grad:
            h.register_hook(lambda g: g.tanh())
        h = torch.tanh(h @ w + x * same)
        return (h, h), x

    return Program(cell, (zeros(), zeros()), steps(), [w])


@program
def hook_of_a_state_in_an_attribute() -> Program:
    w, o = weight(), KeepsH()
    o.state = None

    def cell(h: Tensor, x: Tensor) -> Any:
        before = zeros() if o.state is None else o.state
        if before.requires_grad:
            before.register_hook(lambda g: g.clamp(-0.05, 0.05))
        o.state = torch.tanh(before @ w + x)
        return h, o.state * 2

    return Program(cell, zeros(), steps(), [w], lambda: [o.state])


@program
def hook_of_what_the_body_made() -> Program:
    w = weight()

    def cell(h: Tensor, x: Tensor) -> Any:
        h = torch.tanh(h @ w + x)
        h.register_hook(lambda g: g.clamp(-0.1, 0.1))
        return h, h * 2

    return Program(cell, zeros(), steps(), [w])


@program
def hook_after_a_use() -> Program:
    w = weight()

    def cell(h: Tensor, x: Tensor) -> Any:
        a = h @ w
        b = torch.sin(a) * 3
        a.register_hook(lambda g: g.clamp(-0.1, 0.1))
        h = torch.tanh(a + x + b)
        return h, h * 2

    return Program(cell, zeros(), steps(), [w])


@program
def hook_that_closes_over_a_value() -> Program:
    w = weight()

    def cell(h: Tensor, x: Tensor) -> Any:
        scale = x.abs().mean()
        h = torch.tanh(h @ w + x)
        h.register_hook(lambda g: g * scale)
        return h, h * 2

    return Program(cell, zeros(), steps(), [w])


@program
def hook_beside_state() -> Program:
    w, module = weight(), nn.Module()
    module.n, module.last = 0, None

    def cell(h: Tensor, x: Tensor) -> Any:
        module.n, module.last = module.n + 1, h * 2
        h = torch.tanh(h @ w + x)
        h.register_hook(lambda g: g * 0.5)
        return h, h * 2

    return Program(cell, zeros(), steps(), [w], lambda: [module.n, module.last])


@program
def forward_hook_of_a_module() -> Program:
    layer = nn.Linear(4, 4).double()
    layer.register_forward_hook(lambda module, args, output: output * 0.5)
    cell = lambda h, x: (torch.tanh(layer(h) + x),) * 2  # noqa: E731
    return Program(cell, zeros(), steps(), list(layer.parameters()))


# --- state in attributes ---


class KeepsH(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).double()
        self.h: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.h = torch.tanh(self.layer(x) + (0 if self.h is None else self.h))
        return self.h


class KeepsBuffer(nn.Module):
    mem: Tensor

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).double()
        self.register_buffer("mem", zeros(), persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.mem = 0.9 * self.mem + self.layer(x)
        return torch.sigmoid(self.mem)


def of_module(module: Any, *names: str) -> Program:
    def state() -> list[Any]:
        return [getattr(module, name) for name in names]

    return Program(lambda c, x: (c, module(x)), zeros(), steps(), list(module.parameters()), state)


@program
def attribute_that_is_none_at_first() -> Program:
    return of_module(KeepsH(), "h")


@program
def attribute_that_is_a_tensor_at_first() -> Program:
    module = KeepsH()
    module.h = zeros()
    return of_module(module, "h")


@program
def buffer_that_is_not_persistent() -> Program:
    return of_module(KeepsBuffer(False), "mem")


@program
def buffer_that_is_persistent() -> Program:
    return of_module(KeepsBuffer(True), "mem")


@program
def modules_within_modules() -> Program:
    class Top(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.out = KeepsH(), KeepsBuffer(False), None

        def forward(self, x: Tensor) -> Any:
            self.out = self.two(self.one(x))
            return self.out

    top = Top()
    given = of_module(top)
    return given._replace(state=lambda: [top.out, top.one.h, top.two.mem])


@program
def stash_of_the_last_step() -> Program:
    module = KeepsH()

    def cell(h: Tensor, x: Tensor) -> Any:
        module.attention = torch.softmax(module.layer(x), -1)
        module.last = (h, [x])
        h = torch.tanh(h + module.attention)
        return h, h

    def state() -> list[Any]:
        return [module.attention, module.last[0], module.last[1][0]]

    return Program(cell, zeros(), steps(), list(module.parameters()), state)


@program
def item_of_a_dict() -> Program:
    layer, memory = nn.Linear(4, 4).double(), {}

    def cell(c: Tensor, x: Tensor) -> Any:
        memory["k"] = torch.tanh(layer(x) + memory.get("k", 0))
        return c, memory["k"]

    return Program(cell, zeros(), steps(), list(layer.parameters()), lambda: [memory["k"]])


@program
def items_of_a_list() -> Program:
    layer, memory = nn.Linear(4, 4).double(), [zeros(), zeros()]

    def cell(c: Tensor, x: Tensor) -> Any:
        memory[0] = layer(x) + memory[1]
        memory[1] = torch.tanh(memory[0])
        return c, memory[1]

    return Program(cell, zeros(), steps(), list(layer.parameters()), lambda: list(memory))


@program
def caches_written_at_a_counter() -> Program:
    layer, module = nn.Linear(4, 4).double(), nn.Module()
    module.register_buffer("k", torch.zeros(16, 4, dtype=F64))
    module.register_buffer("v", torch.zeros(16, 4, dtype=F64))
    module.pos = 0

    def cell(h: Tensor, x: Tensor) -> Any:
        with torch.no_grad():
            module.k[module.pos] = layer(x)
            module.v.narrow(0, module.pos, 2).copy_(x.expand(2, 4))
            module.v.select(0, 15).add_(module.pos)
        h = torch.tanh(layer((x @ module.k.T).softmax(-1) @ module.v) + h)
        module.pos += 1
        return h, h

    return Program(
        cell,
        zeros(),
        steps(),
        list(layer.parameters()),
        lambda: [module.k, module.v, torch.tensor(module.pos)],
    )


@program
def keeps_what_it_reads() -> Program:
    w, module = weight(), nn.Module()
    module.total, module.mean, module.last, module.positive = 0.0, 1.0, 0.0, 0

    def cell(h: Tensor, x: Tensor) -> Any:
        h = torch.tanh(h @ w + x) / module.mean
        module.total += h.sum().item()
        module.mean = 0.9 * module.mean + 0.1 * float(h.norm())
        module.last = module.total / 2
        module.positive += int((h > 0).sum())
        return h, h * module.last

    def state() -> list[Any]:
        found = (module.total, module.mean, module.last, module.positive)
        return [torch.tensor(v, dtype=F64) for v in found]

    return Program(cell, zeros(), steps(), [w], state)


@program
def counts_in_an_inner_scan() -> Program:
    w, module = weight(), nn.Module()
    module.h, module.n = zeros(), 0

    def inner(c: Tensor, x: Tensor) -> Any:
        module.h = torch.tanh(x @ w + module.h)
        module.n += 1
        return c + module.h * module.n, module.h

    def cell(c: Tensor, x: Tensor) -> Any:
        c, ys = scan(inner, c, torch.stack([x, -x]))
        return c, ys.sum(0)

    return Program(cell, zeros(), steps(), [w], lambda: [module.h, torch.tensor(module.n)])


def _counts_in_both(first: float, by: float, begins_anew: bool = False) -> Program:
    """A number that the steps of an inner scan change, and those around it read as one."""
    w, module, rows = weight(), nn.Module(), torch.linspace(-1, 1, 12, dtype=F64).view(3, 4)
    module.n = first

    def inner(c: Tensor, x: Tensor) -> Any:
        c = torch.tanh(c @ w + x) * 0.9**module.n
        module.n += by
        return c, c

    def cell(c: Tensor, x: Tensor) -> Any:
        if begins_anew:
            module.n = first
        c, ys = scan(inner, c * 0.9**module.n, rows + x)
        is_int = isinstance(module.n, int)
        module.n += by
        return c * (0.7 if is_int else 0.9**module.n), ys.sum(0)

    return Program(cell, zeros(), steps(), [w], lambda: [torch.tensor(module.n, dtype=F64)])


@program
def counts_around_an_inner_scan() -> Program:
    return _counts_in_both(0, 2)


@program
def decays_around_an_inner_scan() -> Program:
    return _counts_in_both(0.3, 0.7)


@program
def counts_anew_in_an_inner_scan() -> Program:
    return _counts_in_both(0, 1, begins_anew=True)


@program
def counts_after_an_inner_scan_has_read() -> Program:
    w, module = weight(), nn.Module()
    module.n, module.scale = 0, 0.5

    def inner(c: Tensor, x: Tensor) -> Any:
        return torch.tanh(c @ w + x) * module.scale, None

    def cell(c: Tensor, x: Tensor) -> Any:
        c, _ = scan(inner, c, torch.stack([x, -x]))
        module.n += 1
        return c, c

    return Program(cell, zeros(), steps(), [w], lambda: [torch.tensor(module.n)])


@program
def counts_after_a_custom_function_has_read() -> Program:
    w, module = weight(), nn.Module()
    module.n, module.scale = 0, 0.5

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * module.scale

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 0.5

    def cell(c: Tensor, x: Tensor) -> Any:
        c = Scaled.apply(torch.tanh(c @ w + x))
        module.n += 1
        return c, c

    return Program(cell, zeros(), steps(), [w], lambda: [torch.tensor(module.n)])


@program
def rotated_deque() -> Program:
    w, ring = weight(), collections.deque([zeros(), zeros() + 1, zeros() - 1])

    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x + ring[0])
        ring.rotate()
        ring[1] = h
        ring.rotate(-2)
        return h, ring[2]

    return Program(cell, zeros(), steps(), [w], lambda: [*ring])


@program
def delay_line() -> Program:
    w, line = weight(), collections.deque([zeros()] * 3, maxlen=3)

    def cell(h: Tensor, x: Tensor) -> Any:
        h = torch.tanh(h @ w + x + 0.5 * line[0])
        line.append(h)
        return h, h

    return Program(cell, zeros(), steps(), [w], lambda: list(line))


@program
def delay_line_that_fills() -> Program:
    w, line = weight(), collections.deque(maxlen=3)
    longer = collections.deque([zeros()], maxlen=5)

    def cell(h: Tensor, x: Tensor) -> Any:
        line.append(torch.tanh(h @ w + x))
        longer.appendleft(line[-1] * len(longer))
        h = torch.stack(list(line)).mean(0) + longer[-1]
        return h, h

    return Program(cell, zeros(), steps(), [w], lambda: [*line, *longer])


def windowed(keep: Callable[[Any, Tensor], None]) -> Program:
    """A cell that reads the last few carries, which it keeps in lists that are empty at first."""
    w, o = weight(), KeepsH()
    o.kept, o.others = [], []
    begun = o.kept

    def cell(h: Tensor, x: Tensor) -> Any:
        keep(o, h)
        h = torch.tanh(torch.stack(o.kept).mean(0) @ w + x)
        return h, h

    return Program(cell, zeros(), steps(), [w], lambda: [*begun, *o.kept, *o.others])


@program
def last_values_by_pop() -> Program:
    def keep(o: Any, h: Tensor) -> None:
        o.kept.append(h)
        if len(o.kept) > 2:
            o.kept.pop(0)
        o.others.insert(0, h * 2)
        del o.others[3:]

    return windowed(keep)


@program
def last_values_by_slice() -> Program:
    def keep(o: Any, h: Tensor) -> None:
        o.kept.append(h)
        o.kept = o.kept[-2:]
        o.others = [h * 2, *o.others][:3]

    return windowed(keep)


@program
def all_values_of_few_steps() -> Program:
    def keep(o: Any, h: Tensor) -> None:
        o.kept = o.kept + [h]  # noqa: RUF005  (as people write it)
        o.others.append(o.kept[0] * len(o.kept))

    return windowed(keep)


@program
def queue_with_its_end_in_a_buffer() -> Program:
    w, o = weight(), KeepsH()
    o.register_buffer("queue", torch.randn(4, 8, dtype=F64))
    o.register_buffer("end", torch.zeros(1, dtype=torch.int64))

    def cell(h: Tensor, x: Tensor) -> Any:
        key = torch.tanh(h @ w + x)
        scores = key @ o.queue.clone()
        k = int(o.end)
        o.queue[:, k : k + 2] = torch.stack([key, x], 1).detach()
        o.end[0] = (k + 2) % 8
        return key, scores

    return Program(cell, zeros(), steps(), [w], lambda: [o.queue, o.end])


@program
def set_that_the_first_step_fills() -> Program:
    w, o = weight(), KeepsH()
    o.seen, o.done = {"h"}, set()

    def cell(h: Tensor, x: Tensor) -> Any:
        h = torch.tanh(h @ w + x * len(o.seen)) + len(o.done)
        o.seen.update(["x", "h"])
        o.seen.discard("h")
        o.done |= {3, "h"}
        return h, h

    def state() -> list[Any]:
        return [len(o.seen), "x" in o.seen, len(o.done), 3 in o.done]

    return Program(cell, zeros(), steps(), [w], state)


@program
def asks_if_a_counter_is_an_int() -> Program:
    module = KeepsH()
    module.n, module.decay = 0, 1.0

    def cell(h: Tensor, x: Tensor) -> Any:
        module.n += 1
        module.decay *= 0.9
        scale = 3 if isinstance(module.n, int) and type(module.decay) is float else 7
        is_other = isinstance(module.n, (bool, float)) or isinstance(module.n / 2, int)
        h = torch.tanh(module.layer(h) * scale + x) * (7 if is_other else module.decay)
        return h, h

    def state() -> list[Any]:
        return [module.n, module.decay]

    return Program(cell, zeros(), steps(), list(module.parameters()), state)


@program
def object_with_nested_state() -> Program:
    class Memory:
        h, pair = zeros(), (zeros(), [zeros(), zeros()])

    memory, w = Memory(), weight()
    memory.h, memory.pair = zeros(), (zeros(), [zeros(), zeros()])

    def cell(c: Tensor, x: Tensor) -> Any:
        a, (_, d) = memory.pair
        memory.h = torch.tanh(memory.h @ w + x)
        memory.pair = (memory.h + a, [a, d + 1])
        return c, memory.h + d

    def state() -> list[Any]:
        return [memory.h, memory.pair[0], *memory.pair[1]]

    return Program(cell, zeros(), steps(), [w], state)


@program
def nonlocal_variable() -> Program:
    w, h = weight(), None

    def cell(c: Tensor, x: Tensor) -> Any:
        nonlocal h
        h = torch.tanh(x @ w + (0 if h is None else h))
        return c, h

    return Program(cell, zeros(), steps(), [w], lambda: [h])


@program
def counter() -> Program:
    module = KeepsH()
    module.n = 0

    def cell(h: Tensor, x: Tensor) -> Any:
        module.n += 1
        h = torch.tanh(module.layer(x) + h) / module.n
        return h, h

    return Program(cell, zeros(), steps(), list(module.parameters()), lambda: [module.n])


@program
def best_of_what_steps_read() -> Program:
    w, module = weight(), nn.Module()
    module.best, module.least = -math.inf, None

    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x)
        total = h.sum().item()
        module.best = max(module.best, total)
        module.least = total if module.least is None else min(total, module.least)
        return h, h * module.best - module.least

    return Program(cell, zeros(), steps(), [w], lambda: [module.best, module.least])


@program
def batch_norm_of_all_batches() -> Program:
    """Without a momentum, its statistics are averages over as many batches as it has counted."""
    norm = nn.BatchNorm1d(4, momentum=None).to(F64)

    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(norm(torch.stack([h, x, h * x])).sum(0))
        return h, h

    statistics = [norm.running_mean, norm.running_var, norm.num_batches_tracked]
    return Program(cell, zeros(), steps(), list(norm.parameters()), lambda: statistics)


@program
def schedules_by_a_counter() -> Program:
    """Lists and an array of numbers, as a sampler has them."""
    w, module = weight(), nn.Module()
    module.n, module.rates = 0, [0, *(0.1 * k for k in range(1, 8))]
    turns, kept = (3, 1, 4, 1, 5, 9, 2, 6), [True, False] * 4
    noise, slope = np.linspace(0.0, 1.0, 8), nn.LeakyReLU(0.5)

    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        k = module.n
        slope.negative_slope *= 0.9
        x = slope(x) + (0.1, 0.7)[k > 2]
        h = torch.tanh(h @ w * module.rates[-1 - k] + x * turns[k] + float(noise[k]))
        module.n += 1
        return h, h * (1 - 0.9 ** module.rates[k]) + kept[k]

    return Program(cell, zeros(), steps(), [w], lambda: [module.n])


@program
def power_of_a_counter() -> Program:
    module = KeepsH()
    module.n = 0

    def cell(h: Tensor, x: Tensor) -> Any:
        module.n += 1
        h = torch.tanh(module.layer(x) + h) / (1 - 0.999**module.n)
        return h * 1e-3, h

    return Program(cell, zeros(), steps(), list(module.parameters()), lambda: [module.n])


@program
def number_that_decays() -> Program:
    module = KeepsH()
    module.decay = 1.0

    def cell(h: Tensor, x: Tensor) -> Any:
        module.decay *= 0.9
        h = torch.tanh(module.layer(x) + h) * module.decay
        return h, h

    return Program(cell, zeros(), steps(), list(module.parameters()), lambda: [module.decay])


def _numbers_beside_a_tensor(make: Callable[[Tensor, int, float], Any], parts: Any) -> Program:
    module = KeepsH()
    module.state = make(zeros(), 0, 1.0)

    def cell(c: Tensor, x: Tensor) -> Any:
        h, n, decay = parts(module.state)
        h = torch.tanh(module.layer(x) + h * decay) / (1 + n)
        module.state = make(h, n + 1, decay * 0.9)
        return c, h

    def state() -> list[Any]:
        return list(parts(module.state))

    return Program(cell, zeros(), steps(), list(module.parameters()), state)


@program
def numbers_within_a_tuple() -> Program:
    return _numbers_beside_a_tensor(lambda *parts: parts, lambda state: state)


@program
def numbers_within_a_dict() -> Program:
    return _numbers_beside_a_tensor(
        lambda h, n, decay: {"h": h, "rest": [n, decay]}, lambda s: (s["h"], *s["rest"])
    )


@dataclasses.dataclass
class Memory:
    h: Tensor
    n: int
    decay: float


torch.export.register_dataclass(Memory)


@program
def numbers_within_a_dataclass() -> Program:
    return _numbers_beside_a_tensor(Memory, lambda s: (s.h, s.n, s.decay))


@program
def flag_of_the_first_step() -> Program:
    module = KeepsH()
    module.is_first = True

    def cell(c: Tensor, x: Tensor) -> Any:
        if module.is_first:
            module.h, module.is_first = torch.zeros_like(x), False
        return c, module(x)

    parameters = list(module.parameters())
    return Program(cell, zeros(), steps(), parameters, lambda: [module.h, module.is_first])


def _normed(norm: Callable[[nn.Module], nn.Module], *names: str) -> Program:
    layer = norm(nn.Linear(4, 4).double())
    cell = lambda h, x: (torch.tanh(layer(h) + x),) * 2  # noqa: E731

    def state() -> list[Any]:
        return [getattr(layer, name) for name in names]

    return Program(cell, zeros(), steps(), list(layer.parameters()), state)


@program
def weight_norm_of_the_old_kind() -> Program:
    return _normed(nn.utils.weight_norm, "weight")


@program
def spectral_norm_of_the_old_kind() -> Program:
    return _normed(nn.utils.spectral_norm, "weight", "weight_u")


@program
def pruned_layer() -> Program:
    from torch.nn.utils import prune

    return _normed(lambda m: prune.random_unstructured(m, "weight", 0.3), "weight")


@program
def weights_that_a_step_caches() -> Program:
    from torch.nn.utils import parametrizations, parametrize

    layer = parametrizations.orthogonal(nn.Linear(4, 4, bias=False).double())

    def cell(h: Tensor, x: Tensor) -> Any:
        with parametrize.cached():
            h = torch.tanh(layer(h) + layer(x))
        return h, h

    return Program(cell, zeros(), steps(), list(layer.parameters()))


@program
def functional_call_of_an_lstm() -> Program:
    layer = nn.LSTM(4, 4).double()
    weights = {name: w.detach().clone().requires_grad_() for name, w in layer.named_parameters()}

    def cell(h: Tensor, x: Tensor) -> Any:
        ys, _ = torch.func.functional_call(layer, weights, (torch.stack([x, h])[:, None],))
        return ys[1, 0], ys[0, 0]

    return Program(cell, zeros(), steps(), list(weights.values()))
