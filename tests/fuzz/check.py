"""One program in one mode: the scan beside the loop, values and every gradient."""

from __future__ import annotations

import dataclasses
import functools
import linecache
import re
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from allocator import peak_of_allocator
from legality.checker import Checker, checking
from oracle import differentiable
from torch import Tensor

import torch_scan_hop
from torch_scan_hop import tree
from torch_scan_hop._torch.dynamo.errors import DYNAMO_ERRORS
from torch_scan_hop.fallback import forget_reasons

from .by_hand import loop
from .direct import operator_scan
from .modes import EXPORT, Mode, parse_mode
from .program import Program, tolerance_of

Namespace = dict[str, Any]
Values = dict[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """What became of a program.

    ``status``: ok; loop (it ran as one, with a warning); discarded; torch (torch fails in the same
    way on the Python loop); crash or wrong; died, with its process. ``kernels``: of a GPU, that
    its scans were.
    """

    status: str
    where: str = ""
    message: str = ""
    kernels: Sequence[str] = ()

    @property
    def is_failure(self) -> bool:
        return self.status in ("crash", "wrong", "died", "refused")

    @property
    def kind(self) -> str:
        """Failures of one kind are taken for the same while a program shrinks."""
        return f"{self.status} {self.where}"


class _Discarded(Exception):
    """The loop itself raises, or its numbers say nothing."""


_count = 0
# what a rewrite broke is a failure, also where the program went on without the rewrite
_CHECKER = Checker()


def load(text: str, base: str | None = None) -> Namespace:
    """The program's module, new at each call; in another precision if ``base`` names one."""
    global _count
    if base is not None:
        text = re.sub(r"^dtype, cdtype = .*$", f"dtype, cdtype = {base}", text, flags=re.M)
    _count += 1
    name = f"<fuzz {_count}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    # Dynamo imports the module of a function to guard its globals
    module = types.ModuleType(f"fuzzed_{_count}")
    sys.modules[module.__name__] = module
    exec(compile(text, name, "exec"), module.__dict__)
    linecache.cache.pop(f"<fuzz {_count - 50}>", None)
    sys.modules.pop(f"fuzzed_{_count - 50}", None)
    return module.__dict__


def check(program: Program, mode: Mode) -> Outcome:
    return check_text(program.text(), mode, program.tolerance)


def check_text(text: str, mode: Mode, tolerance: float) -> Outcome:
    """A mode that is to try kernels of a GPU discards what none of them takes."""
    thread = mock.patch.object(sys.modules[__name__], "_IN_ANOTHER_THREAD", [mode.other_thread])
    with mode.entered() as kernels, thread:
        outcome = _checked(text, mode, tolerance)
    if outcome.status == "ok" and not mode.has_reached(kernels):
        return Outcome("discarded", "", "no kernel takes it")
    return dataclasses.replace(outcome, kernels=tuple(kernels))


def _checked(text: str, mode: Mode, tolerance: float) -> Outcome:
    with warnings.catch_warnings(record=True) as caught, checking(_CHECKER):
        warnings.simplefilter("always")
        forget_reasons()  # a body with the same code ran before, in another mode
        try:
            outcome = _compared(text, mode, tolerance)
        except _Discarded as error:
            outcome = Outcome("discarded", "", str(error))
        finally:
            torch._dynamo.reset()
            violations = [str(v) for v in _CHECKER.violations]
            _CHECKER.forget()
    if violations:
        where = f"IllegalRewrite in {violations[0].partition(':')[0]}"
        return Outcome("crash", where, f"IllegalRewrite: {violations[0]}")
    if outcome.is_failure or outcome.status == "discarded":
        return outcome
    reasons = [str(w.message) for w in caught if "plain Python loop" in str(w.message)]
    if reasons:
        reason = normalized(reasons[0].partition("plain Python loop: ")[2])
        if mode.captured:
            return Outcome("crash", f"ran as a loop: {reason}", reasons[0])
        return Outcome("loop", reason)
    return outcome


def _compared(text: str, mode: Mode, tolerance: float) -> Outcome:
    expected = _of_the_loop(text, mode)
    outcome = _run_and_compare(text, torch_scan_hop.scan, mode, expected, tolerance)
    if not outcome.is_failure:
        return _beside_the_loops_memory(text, mode) if mode.memory else outcome
    if outcome.status == "wrong" and _is_ill_conditioned(text, mode, expected, tolerance):
        return Outcome("discarded", "", "ill-conditioned")
    if mode.transform == "vmap":
        mapped = _mapped_loop(text, mode)
        if mapped is None:
            return Outcome("discarded", "", "the loop has no batching rule")
        # `x.requires_grad` is not what it is without vmap: of a loop neither
        if not _run_and_compare(text, torch_scan_hop.scan, mode, mapped, tolerance).is_failure:
            return Outcome("ok")
    if mode.backend is not None:
        return _blamed(text, mode, expected, tolerance, outcome)
    return outcome


#: what a program makes with these lies where its inputs do
_MAKERS = ("zeros", "ones", "full", "arange", "tensor", "eye", "empty", "linspace")


def on_the_gpu(text: str) -> str:
    """The program with its inputs, and what it makes itself, on a GPU.

    >>> on_the_gpu("def inputs():\\n    return torch.ones(2)\\n\\ndef program(scan):\\n    torch.ones(3)")
    'def inputs():\\n    return torch.ones(2)\\n\\ndef program(scan):\\n    ones_on_gpu(3)'
    """
    made_before, _, program = text.rpartition("\ndef program(")
    made_within = re.sub(rf"\btorch\.({'|'.join(_MAKERS)})\(", r"\1_on_gpu(", program)
    return f"{made_before}\ndef program({made_within}"


def _loaded_for(text: str, mode: Mode) -> Namespace:
    """The program's module; in mode ``cuda`` its tensors are on a GPU."""
    if not mode.cuda:
        return load(text)
    namespace = load(on_the_gpu(text))
    for name in _MAKERS:
        namespace[f"{name}_on_gpu"] = functools.partial(getattr(torch, name), device="cuda")
    drawn = namespace["inputs"]

    def inputs(seed: int = 0) -> dict[str, Any]:
        return {
            name: v.detach().cuda().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v
            for name, v in drawn(seed).items()
        }

    return {**namespace, "inputs": inputs}


def _run_and_compare(
    text: str, scan: Any, mode: Mode, expected: Values, tolerance: float
) -> Outcome:
    try:
        actual = _evaluated(_loaded_for(text, mode), scan, mode, loop_is_wanted=False)
        actual = {name: value.cpu() for name, value in actual.items()}
    except Exception as error:
        status = "refused" if isinstance(error, DYNAMO_ERRORS) else "crash"
        return Outcome(status, error_kind(error), f"{type(error).__name__}: {str(error)[:1500]}")
    found = difference(actual, expected, tolerance)
    if found is None:
        return Outcome("ok")
    place, message = found
    return Outcome("wrong", place.partition(" ")[0], f"{place}: {message}")


#: what a scan may have at most beside its loop: times as much, and bytes
MORE_MEMORY, SMALL_MEMORY = 1.2, 2**18


def _beside_the_loops_memory(text: str, mode: Mode) -> Outcome:
    """The same program with more steps of larger values: what torch's allocator hands out."""

    def larger(match: re.Match[str]) -> str:
        n, m, k, _ = map(int, match[1].split(","))
        return f"N, M, K, T = {8 * n}, {8 * m}, {8 * k}, 16"

    text = re.sub(r"^N, M, K, T = (.*)$", larger, text, flags=re.M)

    def peak(scan: Any, is_loop: bool) -> int:
        namespace = load(text)
        most = 0
        for _ in range(2):  # the first call traces
            most = peak_of_allocator(lambda: _evaluated(namespace, scan, mode, is_loop))
        return most

    try:
        of_loop = peak(loop, True)
    except Exception as error:
        raise _Discarded("not at other sizes") from error
    found = peak(torch_scan_hop.scan, False)
    if found <= MORE_MEMORY * of_loop + SMALL_MEMORY:
        return Outcome("ok")
    message = f"{found / 2**20:.2f} MiB, {found / of_loop:.2f} times the loop's"
    return Outcome("wrong", "memory", message)


def _blamed(text: str, mode: Mode, expected: Values, tolerance: float, outcome: Outcome) -> Outcome:
    """A failure under a compiler that is the body's own, or the compiler's.

    A compiled region holds no loop: what runs as one in eager mode is refused there. And a
    compiler may fail on the Python loop as well.
    """
    if outcome.status == "refused":
        if check_text(text, parse_mode("eager"), tolerance).status == "loop":
            return Outcome("loop", f"refused: {outcome.where}")
        outcome = dataclasses.replace(outcome, status="crash")
    of_the_loop = _run_and_compare(text, loop, mode, expected, tolerance)
    if of_the_loop.is_failure and of_the_loop.where == outcome.where:
        return dataclasses.replace(outcome, status="torch")
    return outcome


def _mapped_loop(text: str, mode: Mode) -> Values | None:
    try:
        return _evaluated(load(text), loop, mode, loop_is_wanted=False, compiled=False)
    except Exception:
        return None


def _of_the_loop(text: str, mode: Mode, noise: float = 0.0) -> Values:
    try:
        namespace = load(text, "torch.float64, torch.complex128")
        if noise:
            namespace["normal"] = _noisy(namespace["normal"], noise)
        return _evaluated(namespace, loop, mode, loop_is_wanted=True)
    except Exception as error:
        raise _Discarded(f"{type(error).__name__}: {str(error)[:200]}") from error


def _noisy(normal: Callable[..., Tensor], noise: float) -> Callable[..., Tensor]:
    def noisy(g: torch.Generator, *shape: int) -> Tensor:
        made = normal(g, *shape)
        other = torch.Generator().manual_seed(99)
        return made * (1 + noise * torch.randn(made.shape, generator=other, dtype=made.dtype))

    return noisy


def _is_ill_conditioned(text: str, mode: Mode, expected: Values, tolerance: float) -> bool:
    """Inputs that differ in their last digits give other results: a tie, or chaos."""
    noise = 1e-14 if tolerance < 1e-5 else 1e-7
    try:
        other = _of_the_loop(text, mode, noise)
    except _Discarded:
        return True
    return difference(other, expected, tolerance / 20) is not None


# --- values ---


def _evaluated(
    namespace: Namespace, scan: Any, mode: Mode, loop_is_wanted: bool, compiled: bool = True
) -> Values:
    torch.manual_seed(0)
    if mode.checkpoint is not None and not loop_is_wanted:
        scan = _with_checkpoint(scan, namespace, mode.checkpoint)
    if mode.operator and scan is not loop:
        scan = operator_scan()

    def run(inputs: dict[str, Any]) -> Any:
        return namespace["program"](scan, **inputs)

    if mode.transform == "vmap":
        inputs, run = _batched(namespace, run, loop_is_wanted)
    else:
        inputs = namespace["inputs"](0)
    if mode.region and not loop_is_wanted:
        run = _in_a_region(run)
    if mode.backend == EXPORT and not loop_is_wanted:
        run = _exported(run, inputs, strict=bool(mode.dynamic))
    elif mode.backend is not None and not loop_is_wanted and compiled:
        run = torch.compile(run, backend=mode.backend, fullgraph=True, dynamic=mode.dynamic)
    if mode.cuda and mode.graphs and not loop_is_wanted:
        for _ in range(2):  # what is captured in the second call is replayed in the third
            TRANSFORMS[mode.transform](run, inputs)
            torch.manual_seed(0)
    return TRANSFORMS[mode.transform](run, inputs)


def _in_a_region(run: Any) -> Any:
    def in_a_region(inputs: dict[str, Any]) -> Any:
        def region(*values: Any) -> Any:
            return run(dict(zip(inputs, values, strict=True)))

        return torch.utils.checkpoint.checkpoint(region, *inputs.values(), use_reentrant=False)

    return in_a_region


def _exported(run: Any, inputs: dict[str, Any], strict: bool) -> Any:
    class Exported(torch.nn.Module):
        def forward(self, inputs: dict[str, Any]) -> Any:
            return run(inputs)

    module = torch.export.export(Exported(), (inputs,), strict=strict).module()
    torch.manual_seed(0)
    return module


def _with_checkpoint(scan: Any, namespace: Namespace, policy: str) -> Any:
    value = eval(policy, dict(namespace))

    def with_policy(*args: Any, **kwargs: Any) -> Any:
        return scan(*args, **{**kwargs, "checkpoint": value})

    return with_policy


BATCH = 3


def _batched(namespace: Namespace, run: Any, as_stack: bool) -> tuple[dict[str, Any], Any]:
    """Inputs with a batch dimension, but for some that all examples share; ``run`` over them."""
    examples = [namespace["inputs"](seed) for seed in range(BATCH)]
    names = list(examples[0])
    shared = {name for name in names if name[0] in "wk" and len(name) % 2 == int(name[-1]) % 2}
    inputs = {}
    for name in names:
        first = examples[0][name]
        if not isinstance(first, Tensor):
            raise _Discarded("vmap takes no floats")
        values = [e[name].detach() for e in examples]
        value = first.detach() if name in shared else torch.stack(values)
        inputs[name] = value.requires_grad_(first.requires_grad)

    def flat(*values: Any) -> tuple[Tensor, ...]:
        return tuple(_tensors(run(dict(zip(names, values, strict=True)))))

    in_dims = tuple(None if name in shared else 0 for name in names)

    def stacked(inputs: dict[str, Any]) -> Any:
        rows = [
            flat(*(v if name in shared else v[b] for name, v in inputs.items()))
            for b in range(BATCH)
        ]
        return [torch.stack(leaves) for leaves in zip(*rows, strict=True)]

    def mapped(inputs: dict[str, Any]) -> Any:
        return torch.func.vmap(flat, in_dims, randomness="different")(*inputs.values())

    return inputs, stacked if as_stack else mapped


def _tensors(result: Any) -> list[Tensor]:
    return [v for v in tree.leaves(result) if isinstance(v, Tensor)]


def _named(result: Any) -> Values:
    found = {}
    for path, leaf in tree.leaves_with_paths(result, "result"):
        if leaf is not None:
            value = leaf if isinstance(leaf, Tensor) else torch.tensor(leaf, dtype=torch.float64)
            found[f"value {path}"] = value
    return found


def weighted_sum(result: Any) -> Tensor:
    """One number that depends on every differentiable leaf, each with weights of its own.

    What comes back to the leaves is contiguous, expanded, or has its dimensions backwards: the
    first has weights, the second one weight, the third is turned round before it has its own.
    """
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=torch.float64)
    for k, leaf in enumerate(differentiable([v for v in _tensors(result)])):
        if leaf.dtype.is_complex and not leaf.numel():
            continue  # torch's backward of view_as_real raises on an empty, expanded gradient
        real = torch.view_as_real(leaf) if leaf.dtype.is_complex else leaf
        if k % 3 == 2:
            real = real.permute([*reversed(range(real.ndim))])
        weight = torch.randn(
            () if k % 3 == 1 else real.shape, dtype=torch.float64, generator=generator
        )
        real = real.sum() if k % 3 == 1 else real.to(torch.float64)
        real = real.cpu()
        total = total + (real * weight).sum()
    return total


def _wrt(inputs: dict[str, Any]) -> dict[str, Tensor]:
    return {n: t for n, t in inputs.items() if isinstance(t, Tensor) and t.requires_grad}


#: of the thread that differentiates: autograd has one of its own for a GPU's nodes, in which no
#: context of the program is there
_IN_ANOTHER_THREAD = [False]


def _differentiate(*args: Any, **kwargs: Any) -> Any:
    if not _IN_ANOTHER_THREAD[0]:
        return torch.autograd.grad(*args, **kwargs)
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(torch.autograd.grad, *args, **kwargs).result()


def _gradients(total: Tensor, wrt: dict[str, Tensor], label: str, create: bool = False) -> Values:
    if not wrt:
        return {}
    tensors = list(wrt.values())
    found: Any = [None] * len(tensors)
    if total.requires_grad:
        found = _differentiate(total, tensors, allow_unused=True, create_graph=create)
    return {
        f"{label} {name}": torch.zeros_like(t) if g is None else g
        for (name, t), g in zip(wrt.items(), found, strict=True)
    }


def _values_and_gradients(run: Any, inputs: dict[str, Any]) -> Values:
    result = run(inputs)
    values = _named(result)
    values |= _gradients(weighted_sum(result), _wrt(inputs), "gradient")
    given = {name: t for name, t in inputs.items() if isinstance(t, Tensor)}
    values |= {f"input {name}": t.detach() for name, t in given.items()}
    return values


def _second_order(run: Any, inputs: dict[str, Any]) -> Values:
    result = run(inputs)
    wrt = _wrt(inputs)
    first = _gradients(weighted_sum(result), wrt, "gradient", create=True)
    second = _gradients(
        weighted_sum(list(first.values())) + 0 * weighted_sum(result), wrt, "second"
    )
    return _named(result) | first | second


def _over_floats(inputs: dict[str, Any]) -> tuple[list[str], tuple[Tensor, ...]]:
    tensors = {name: t for name, t in inputs.items() if isinstance(t, Tensor)}
    names = [n for n, t in tensors.items() if t.is_floating_point() or t.is_complex()]
    return names, tuple(inputs[n].detach() for n in names)


def _tangents(primals: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    made = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in primals]
    return tuple(m.to(p.dtype) for m, p in zip(made, primals, strict=True))


def _forward_mode(run: Any, inputs: dict[str, Any]) -> Values:
    names, primals = _over_floats(inputs)

    def floats(*values: Tensor) -> list[Tensor]:
        return differentiable(_tensors(run({**inputs, **dict(zip(names, values, strict=True))})))

    if not names:
        raise _Discarded("no float input")
    out, tangents, *_ = torch.func.jvp(floats, primals, _tangents(primals))
    return _named(out) | {f"tangent {k}": t for k, t in enumerate(tangents)}


def _func_grad(run: Any, inputs: dict[str, Any]) -> Values:
    names, primals = _over_floats(inputs)
    real = [k for k, p in enumerate(primals) if not p.is_complex()]
    if not real:
        raise _Discarded("no float input")

    def total(*values: Tensor) -> Tensor:
        return weighted_sum(run({**inputs, **dict(zip(names, values, strict=True))}))

    found = torch.func.grad(total, tuple(real))(*primals)
    return {f"gradient {names[k]}": g for k, g in zip(real, found, strict=True)}


def _forward_over_reverse(run: Any, inputs: dict[str, Any]) -> Values:
    import torch.autograd.forward_ad as forward_ad

    with forward_ad.dual_level():
        names = list(_wrt(inputs))
        tangents = _tangents(tuple(inputs[n] for n in names))
        duals = {
            n: forward_ad.make_dual(inputs[n], t) for n, t in zip(names, tangents, strict=True)
        }
        total = weighted_sum(run({**inputs, **duals}))
        gradients = _gradients(total, duals, "gradient", create=True)
        found: Values = {}
        for name, gradient in gradients.items():
            primal, tangent = forward_ad.unpack_dual(gradient)
            found[name] = primal.detach().clone()
            found[f"tangent {name}"] = (
                torch.zeros_like(primal) if tangent is None else tangent.detach().clone()
            )
    return found


TRANSFORMS: dict[str, Callable[[Any, dict[str, Any]], Values]] = {
    "gradients": _values_and_gradients,
    "vmap": _values_and_gradients,
    "double": _second_order,
    "jvp": _forward_mode,
    "func_grad": _func_grad,
    "forward_over_reverse": _forward_over_reverse,
}


# --- comparison ---


def difference(actual: Values, expected: Values, tolerance: float) -> tuple[str, str] | None:
    """Where they differ, and how; ``expected`` may be of a higher precision."""
    if list(actual) != list(expected):
        return "structure", f"got {list(actual)}, expected {list(expected)}"
    for name, want in expected.items():
        message = _differs(actual[name].detach(), want.detach(), tolerance)
        if message:
            return name, message
    return None


def _differs(got: Tensor, want: Tensor, tolerance: float) -> str | None:
    if got.shape != want.shape:
        return f"got shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if _family(got) != _family(want):
        return f"got {got.dtype}, expected {want.dtype}"
    if tolerance < 1e-5 and got.dtype != want.dtype:
        return f"got {got.dtype}, expected {want.dtype}"
    if not want.numel():
        return None
    got, want = got.resolve_conj().resolve_neg(), want.resolve_conj().resolve_neg()
    if _family(want) in ("integer", "bool"):
        return None if torch.equal(got.long(), want.long()) else _told(got, want)
    got = got.to(want.dtype)
    finite = want[want.isfinite()].abs()
    scale = finite.max().item() if finite.numel() else 0.0
    close = torch.allclose(
        got, want, rtol=tolerance, atol=tolerance * scale + tolerance * 1e-3, equal_nan=True
    )
    return None if close else _told(got, want)


def _family(t: Tensor) -> str:
    if t.dtype == torch.bool:
        return "bool"
    return "complex" if t.is_complex() else "float" if t.is_floating_point() else "integer"


def _told(got: Tensor, want: Tensor) -> str:
    def some(t: Tensor) -> str:
        values = t.flatten()[:6].tolist()
        return f"{values}{'...' if t.numel() > 6 else ''}"

    return f"got {some(got)}, expected {some(want)}"


# --- errors ---


def error_kind(error: BaseException) -> str:
    """The first telling line of an error, without numbers and names that vary."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = " ".join(lines[:2]) if lines and lines[0].endswith("raised:") else (lines or [""])[0]
    return f"{type(error).__name__}: {normalized(first)}"


def normalized(text: str) -> str:
    text = re.sub(r"<fuzz \d+>:\d+|0x[0-9a-f]+|\bv\d+\b|\b[a-z]+_?\d+\b", "*", text)
    text = re.sub(r"[-+]?\d+(\.\d+)?(e-?\d+)?", "#", text)
    return re.sub(r"([*#])(?:, [*#])+", r"\1", text)[:110]


def show(path: str, mode: str) -> bool:
    """Check the program in a file; whether it fails."""
    with open(path) as file:
        text = file.read().partition("if __name__")[0]
    outcome = check_text(text, parse_mode(mode), tolerance_of(text))
    print(f"{mode}: {outcome.status} {outcome.where}\n{outcome.message}")
    return outcome.is_failure
