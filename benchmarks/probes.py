"""Measurements that want a process of their own: compile time, memory, cost per step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.contestants import CONTESTANTS, CPP, EAGER
from benchmarks.timing import interleaved, once
from benchmarks.workloads import ALL, WORKLOADS, case
from tests.allocator import peak_of_allocator


def compile_time(workload: str, contestant: str, T: int) -> dict[str, Any]:
    """Seconds of the first forward + backward, less those of the second, in a cold process.

    ``toolchain``: before it, a kernel of one addition is compiled, with the same wrapper, which
    pays what a machine pays once: imports, probing the C++ compiler, precompiled headers.
    ``cpu``: processor seconds of the same, with the C++ compiler's; other work does not stretch it.
    """
    chosen = ALL[workload]
    given = case(chosen, T)
    start = time.perf_counter()
    one = torch.compile(lambda x: x + 1, options={"cpp_wrapper": contestant == CPP})
    one(torch.ones(8))
    toolchain = time.perf_counter() - start
    train = CONTESTANTS[contestant](chosen, given).train
    seconds, cpu = [], []
    for _ in range(2):
        start, start_cpu = time.perf_counter(), sum(os.times()[:4])
        train()
        seconds.append(time.perf_counter() - start)
        cpu.append(sum(os.times()[:4]) - start_cpu)
    return {
        "workload": workload,
        "contestant": contestant,
        "T": T,
        "toolchain": toolchain,
        "second": seconds[1],
        "compile": seconds[0] - seconds[1],
        "cpu": cpu[0] - cpu[1],
    }


def first_eager_call() -> float:
    """Seconds of the first training step of an LSTM in eager mode, less those of the second."""
    workload = WORKLOADS["lstm"]
    train = CONTESTANTS[EAGER](workload, case(workload, workload.T)).train
    return once(train) - once(train)


def resident(field: str) -> int:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def peak_of_process(call: Callable[[], object]) -> int | None:
    """Growth of the resident set to its high-water mark, which Linux lets a process reset."""
    try:
        with open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")
    except OSError:
        return None
    before = resident("VmRSS")
    result = call()
    del result
    return resident("VmHWM") - before


def peak_memory(workload: str, contestant: str, sizes: list[int]) -> list[dict[str, Any]]:
    """Of one forward + backward, without inputs, after a warm-up at the same T."""
    chosen, rows = WORKLOADS[workload], []
    for T in sizes:
        train = CONTESTANTS[contestant](chosen, case(chosen, T)).train
        train()
        row = {"workload": workload, "contestant": contestant, "T": T}
        process = peak_of_process(train)
        rows.append(row | {"allocator": peak_of_allocator(train), "process": process})
        torch.compiler.reset()
    return rows


def growth(workload: str, contestant: str, sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """Time against T."""
    chosen = ALL[workload]
    rows = []
    for direction in ("forward", "train"):
        calls = {}
        for T in sizes:
            call = getattr(CONTESTANTS[contestant](chosen, case(chosen, T)), direction)
            call(), call()
            calls[str(T)] = call
        for T_name, timing in interleaved(calls, rounds).items():
            row = {"workload": workload, "contestant": contestant, "direction": direction}
            rows.append(row | {"T": int(T_name)} | asdict(timing))
        torch.compiler.reset()
    return rows
