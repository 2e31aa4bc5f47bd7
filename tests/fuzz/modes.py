"""Modes: a backend, a transform, switches; written ``inductor+no_blocks+double``."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from fake_graphs import CountedGraphs
from on_the_cpu import serving, triton_kernels
from torch import Tensor, fx

from torch_scan_hop import api, fallback, set_default
from torch_scan_hop._torch.fakes import FakeTensorMode
from torch_scan_hop._torch.inductor_passes import trace_decomposed
from torch_scan_hop.body import part_writes
from torch_scan_hop.body.carries_in import with_joined
from torch_scan_hop.cuda_graphs import graphed, recording
from torch_scan_hop.cuda_graphs.devices import CudaGraphs
from torch_scan_hop.dispatch import autograd as autograd_kernel
from torch_scan_hop.eager import few_steps, run, writer
from torch_scan_hop.eager.few_steps import run_as_written
from torch_scan_hop.inductor import passes
from torch_scan_hop.inductor.passes import prepare_scans
from torch_scan_hop.op import ScanOptions, call_scan
from torch_scan_hop.rewrites import blocks, costs
from torch_scan_hop.rewrites.options import Options, using_options
from torch_scan_hop.signature import Inputs

FLOATS = {torch.float32, torch.float64}

#: torch.export, whose second word is whether it is strict
EXPORT = "export"

BACKENDS: dict[str, tuple[str | None, bool | None]] = {
    "eager": (None, None),
    "loop": (None, None),
    "aot_eager": ("aot_eager", None),
    "aot_dynamic": ("aot_eager_decomp_partition", True),
    "inductor": ("inductor", False),
    "inductor_dynamic": ("inductor", True),
    "inductor_cpp": ("inductor", False),
    "export": (EXPORT, True),
    "export_not_strict": (EXPORT, False),
    "triton": ("inductor", False),
}
TRANSFORMS = ("double", "jvp", "vmap", "func_grad", "forward_over_reverse")
REWRITES = tuple(f.name for f in dataclasses.fields(Options) if f.type == "bool" and f.default)
#: of Inductor's, which change nothing in eager mode
KERNELS = ("one_kernel", "panels", "parallel_in_time", "scalars")
CHECKPOINTS = {"full": '"full"', "sqrt": '"sqrt"', "segments": "3", "binomial": "Binomial(2)"}

#: names for several modes at once
GROUPS = {
    "rewrites": [f"eager+only_{name}" for name in REWRITES if name not in KERNELS],
    "rewrites_inductor": [f"inductor+only_{name}" for name in REWRITES],
    "checkpoints": [f"eager+checkpoint_{name}" for name in CHECKPOINTS],
    "transforms": [f"eager+{name}" for name in TRANSFORMS],
}


@dataclass(frozen=True)
class Mode:
    name: str
    backend: str | None = None
    dynamic: bool | None = None
    cpp_wrapper: bool = False
    transform: str = "gradients"
    options: dict[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    small_blocks: bool = False
    #: the operator is called itself, with a module for its body
    operator: bool = False
    #: the program is in a ``torch.utils.checkpoint``
    region: bool = False
    #: a scan that runs as a plain loop is a failure
    captured: bool = False
    #: ``set_default(compile=True)``
    compile: bool = False
    #: loops are replayed as graphs, which are fakes on the CPU, from their first call on
    graphs: bool = False
    #: two threads share every kernel of the CPU, however small
    threads: bool = False
    #: scans are Triton's kernels where they can be, which run in its interpreter
    triton: bool = False
    #: and few steps are tiles of kernels that are parallel in time: others do not count
    tiles: bool = False
    #: scans are written out as scalars wherever they can be: others do not count
    scalars: bool = False
    #: products of counted loops read packed weights, others are oneDNN's, however small
    panels: bool = False
    #: every value is a large one, which is written to in place: others do not count
    large: bool = False
    #: peak memory is compared with the loop's, too
    memory: bool = False
    #: the scan runs on a GPU, the loop on the CPU
    cuda: bool = False
    #: gradients are taken in another thread, as those of a GPU are
    other_thread: bool = False
    #: few small steps run as they are written: others do not count
    few_steps: bool = False

    def has_reached(self, kernels: Sequence[str]) -> bool:
        """Whether ``kernels`` were taken that this mode is to try, if it is."""
        if self.tiles:
            return "ParallelKernel" in kernels
        named = (self.triton, self.graphs, self.scalars, self.panels, self.large, self.few_steps)
        is_forced = any(named)
        return bool(kernels) or not is_forced

    @contextmanager
    def entered(self) -> Iterator[list[str]]:
        """Gives a list of the kernels that are taken meanwhile, in mode ``triton``."""
        kernels: list[str] = []
        with ExitStack() as stack:
            stack.enter_context(using_options(**self.options))
            stack.enter_context(few_steps_as_written(self.few_steps, kernels))
            if self.compile:
                stack.enter_context(set_default(compile=True))
            if self.backend == "inductor" or self.compile:
                stack.enter_context(_inductor_config(cpp_wrapper=self.cpp_wrapper))
            if self.name.startswith("loop"):
                stack.enter_context(fallback("allow"))
                stack.enter_context(mock.patch.object(api, "remembered_reason", _not_traceable))
            if self.small_blocks:
                stack.enter_context(_blocks_of_few_steps())
            if self.graphs:
                device, graphs = ("cuda", CudaGraphs) if self.cuda else ("cpu", CountedGraphs)
                stack.enter_context(_graphs_of_few_steps(kernels, device, graphs))
            if self.triton or self.cuda:
                stack.enter_context(_kernels_of_a_gpu(kernels, interpreted=self.triton))
            if self.threads:
                stack.enter_context(_two_threads())
            if self.tiles:
                stack.enter_context(tiles_of_few_steps(4))
            if self.scalars:
                stack.enter_context(written_out(kernels))
            if self.large:
                stack.enter_context(everything_is_large(kernels))
            if self.panels:
                stack.enter_context(_small_panels(kernels, compiled=self.backend is not None))
            if (self.scalars or self.panels) and self.backend is None:
                stack.enter_context(_rewritten_for_inductor())
            yield kernels


@contextmanager
def few_steps_as_written(allowed: bool, found: list[str]) -> Iterator[None]:
    """Few small steps run as they are written, and ``found`` has an item for each; or none do."""
    if not allowed:
        with mock.patch.object(few_steps, "MAX_STEPS", 0):
            yield
        return

    def run(*args: Any) -> Any:
        found.append("as written")
        return run_as_written(*args)

    with mock.patch.object(autograd_kernel, "run_as_written", run):
        yield


@contextmanager
def written_out(found: list[str]) -> Iterator[None]:
    """Bodies that are kernels as they are become scalars, too; ``found`` has an item for each."""
    from torch_scan_hop.inductor import rewriter

    class Noted(rewriter.WrittenOut):
        def run(self, *args: Any) -> Any:
            results = super().run(*args)
            found.append("scalars")
            return results

    with (
        mock.patch.object(rewriter, "may_be_one_kernel", lambda _: False),
        mock.patch.object(rewriter, "WrittenOut", Noted),
    ):
        yield


@contextmanager
def _small_panels(found: list[str], compiled: bool) -> Iterator[None]:
    """Products of any size are what large ones are; ``found`` has the packed ones of each loop."""
    from torch_scan_hop.inductor import plans
    from torch_scan_hop.inductor.cpu import large_products, panels

    def pack(*args: Any) -> bool:
        packs = panels.pack_weights(*args)
        found.extend(["panels"] * packs)
        return packs

    with (
        using_options(one_kernel=False, onednn=True),
        mock.patch.object(panels, "FEWEST_STEPS", 1),
        mock.patch.object(plans, "pack_weights", pack),
        mock.patch.object(panels, "LEAST_FLOPS", 0),
        mock.patch.object(large_products, "LEAST_FLOPS", 0),
        # without a compiler, any numbers do
        mock.patch.object(panels, "DTYPES", panels.DTYPES if compiled else FLOATS),
    ):
        yield


@contextmanager
def _rewritten_for_inductor() -> Iterator[None]:
    """Eager scans run as the graphs that Inductor would compile, which takes no compiler."""

    def step_by_step(body: fx.GraphModule, inputs: Inputs[Any], options: ScanOptions) -> Any:
        return run.loop(body, with_joined(inputs), options)

    def planned(body: fx.GraphModule, inputs: Inputs[Any], options: ScanOptions) -> Any:
        whole = with_joined(inputs)
        split = whole.signature.split_inputs
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes = [mode.from_tensor(v) if isinstance(v, Tensor) else v for v in whole.flat()]
        call = torch.func.functionalize(lambda *flat: call_scan(body, split(flat), options))
        gm = trace_decomposed(call, fakes)
        prepare_scans(gm)
        with mock.patch.object(run, "_planned", step_by_step):
            return gm(*whole.flat())

    def failed(message: str, *args: Any, exc_info: Any = None) -> None:
        raise AssertionError(message % args) from (exc_info if exc_info is not True else None)

    with (
        mock.patch.object(run, "_planned", planned),
        mock.patch.object(run.log, "warning", failed),
        mock.patch.object(passes.log, "warning", failed),
    ):
        yield


@contextmanager
def tiles_of_few_steps(rows: int) -> Iterator[None]:
    """Kernels parallel in time take scans of any length, in tiles of so many rows of 8 lanes."""
    from torch_scan_hop.inductor.gpu import parallel

    with (
        mock.patch.object(parallel, "LEAST_STEPS", 1),
        mock.patch.object(parallel, "ELEMENTS", rows * parallel.MOST_LANES),
    ):
        yield


@contextmanager
def _graphs_of_few_steps(found: list[str], device: str, graphs: Any) -> Iterator[None]:
    """Small programs are replayed, too, and what is left over runs; ``found`` has each capture.

    A capture of a real GPU must not be the first call, which compiles what it launches.
    """

    class Noted(graphs):
        def capture(self, *args: Any) -> Any:
            replay = super().capture(*args)
            found.append("CUDA graph")
            return replay

    with (
        using_options(cuda_graphs=True, one_kernel=False),
        serving(device, Noted()),
        mock.patch.object(graphed, "PLAIN_CALLS", 1 if device == "cuda" else 0),
        mock.patch.object(graphed, "LEAST_STEPS", 1),
        mock.patch.object(recording, "LEAST_STEPS", 1),
        mock.patch.object(recording, "MOST_STEPS", 2),
    ):
        yield


def prepare(modes: Sequence[Mode]) -> None:
    """Start this process anew if need be: Triton reads how it is to run when it is imported."""
    if not any(mode.triton for mode in modes):
        return
    if os.environ.get("TRITON_INTERPRET") != "1":
        os.environ["TRITON_INTERPRET"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", __package__, *sys.argv[1:]])
    import triton_interpreter  # noqa: F401


@contextmanager
def _two_threads() -> Iterator[None]:
    import torch._inductor.config as config

    from torch_scan_hop.inductor import spans

    with config.patch({"cpp.threads": 2}), mock.patch.object(spans, "WORK_FOR_THREADS", 1):
        yield


@contextmanager
def _kernels_of_a_gpu(found: list[str], interpreted: bool) -> Iterator[None]:
    """The names of a GPU's kernels that scans compiled within become, in order.

    ``interpreted``: on the CPU, in Triton's interpreter.
    """
    from torch_scan_hop.inductor import gpu
    from torch_scan_hop.inductor.watch import watching

    def take(_: Any, kernel: Any, __: Any) -> None:
        if isinstance(kernel, gpu.KERNELS):
            found.append(type(kernel).__name__)

    with triton_kernels() if interpreted else nullcontext(), watching(take):
        yield


def _inductor_config(cpp_wrapper: bool) -> Any:
    """No cache: a program's code is made by the code that is tested, mutants included."""
    import torch._inductor.config as config

    return config.patch(
        cpp_wrapper=cpp_wrapper, force_disable_caches=True, compile_threads=1, fallback_random=True
    )


def _not_traceable(*_: Any) -> str:
    """The loop that untraceable bodies run in, for all of them."""
    return "the fuzzer says so"


@contextmanager
def _blocks_of_few_steps() -> Iterator[None]:
    """Small programs go through blocks, too."""
    with (
        mock.patch.object(blocks, "BLOCK_BYTES", 64),
        mock.patch.object(blocks, "MIN_BLOCK", 2),
        mock.patch.object(blocks, "MIN_BLOCKS", 2),
    ):
        yield


@contextmanager
def everything_is_large(written: list[str]) -> Iterator[None]:
    """As if copies of the smallest values took long; ``written`` has an item for each write."""
    from torch_scan_hop.inductor import loop

    in_eager, in_loops = writer.calls_in_place, loop.partly_written

    def calls_in_place(*args: Any) -> Any:
        found = in_eager(*args)
        written.extend(node.name for node in found)
        return found

    def partly_written(*args: Any) -> Any:
        found = in_loops(*args)
        written.extend(node.name for writes in found.values() for node in writes)
        return found

    with (
        mock.patch.object(writer, "calls_in_place", calls_in_place),
        mock.patch.object(loop, "partly_written", partly_written),
        mock.patch.object(part_writes, "LARGE_BYTES", 0),
        mock.patch.object(costs, "LARGE_STATE", 0),
    ):
        yield


def parse_mode(text: str) -> Mode:
    """
    >>> parse_mode("inductor+only_batch_xs+double").options["hoist_invariant"]
    False
    """
    name, *parts = text.split("+")
    if name not in BACKENDS:
        raise ValueError(f"no backend {name!r}; there are {', '.join(BACKENDS)}")
    backend, dynamic = BACKENDS[name]
    flags = {"cpp_wrapper": name == "inductor_cpp", "triton": name == "triton"}
    mode = Mode(text, backend, dynamic, **flags)
    for part in parts:
        mode = _with_part(mode, part)
    return mode


def _with_part(mode: Mode, part: str) -> Mode:
    if part in TRANSFORMS:
        return dataclasses.replace(mode, transform=part)
    if part == "small_blocks":
        return dataclasses.replace(mode, small_blocks=True)
    if part in (
        "operator",
        "region",
        "captured",
        "compile",
        "graphs",
        "threads",
        "tiles",
        "scalars",
        "panels",
        "large",
        "memory",
        "cuda",
        "other_thread",
        "few_steps",
    ):
        return dataclasses.replace(mode, **{part: True})
    word, _, name = part.partition("_")
    if word == "only" and name in REWRITES:
        return dataclasses.replace(mode, options={r: r == name for r in REWRITES})
    if word == "no" and name in REWRITES:
        return dataclasses.replace(mode, options={**mode.options, name: False})
    if word == "checkpoint" and name in CHECKPOINTS:
        return dataclasses.replace(mode, checkpoint=CHECKPOINTS[name])
    raise ValueError(f"no mode part {part!r}")


def parse_modes(text: str) -> list[Mode]:
    """Comma-separated modes and names of groups."""
    names = [n for word in text.split(",") for n in GROUPS.get(word, [word])]
    return [parse_mode(name) for name in names]
