"""Decide whether threads share a kernel's work: if waking them pays, and if they come when woken.

The end of a parallel region waits for all of its threads. Where other processes keep the cores
busy, a thread that has lost its core is late by tens of milliseconds, while the others spin
(libgomp's way, unless ``OMP_WAIT_POLICY=PASSIVE``): work of a millisecond takes fifty. So a kernel
measures its time. If threads took longer than one thread would have, with a margin, the kernel runs
in one thread for a tenth of a second and then tries again. Each time that threads are late, it
waits twice as long.
"""

from __future__ import annotations

from torch_scan_hop._torch.inductor_cpp import KernelFunction, parallel_num_threads
from torch_scan_hop.inductor import spans
from torch_scan_hop.inductor.spans import Span

# The most time that a core takes for a result of an operator, and a margin: a kernel that takes
# longer in threads has waited for them.
NANOSECONDS_PER_RESULT = 1
MARGIN_NANOSECONDS = 10**6

SOURCE = """
#ifndef SCAN_SHARING
#define SCAN_SHARING
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
namespace {
// In nanoseconds, as all times here.
constexpr int64_t FIRST_PAUSE = 100000000, LONGEST_PAUSE = 5000000000;
// What the calls of one kernel know of one another. Two at once may overwrite what they noted: the
// numbers that the kernel computes do not depend on it.
struct ScanThreads {
    std::atomic<int64_t> alone_until{0};
    std::atomic<int64_t> pause{0};
};
struct ScanSharing {
    ScanThreads& threads;
    const int64_t expected;
    const int64_t start;
    const bool shares;
    static int64_t now() {
        auto since = std::chrono::steady_clock::now().time_since_epoch();
        return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
    }
    ScanSharing(ScanThreads& threads, bool is_worth_it, int64_t expected)
        : threads(threads),
          expected(expected),
          start(is_worth_it ? now() : 0),
          shares(is_worth_it && start >= threads.alone_until.load(std::memory_order_relaxed)) {}
    ~ScanSharing() {
        if (!shares) return;
        const int64_t end = now();
        const int64_t before = threads.pause.load(std::memory_order_relaxed);
        int64_t pause = before / 2;  // to come once is no proof that they will again
        if (end - start > expected) {
            pause = std::min(std::max(2 * before, FIRST_PAUSE), LONGEST_PAUSE);
            threads.alone_until.store(end + pause, std::memory_order_relaxed);
        }
        threads.pause.store(pause, std::memory_order_relaxed);
    }
};
}  // namespace
#endif
"""


def threads_for(span: Span) -> int:
    """Return how many threads may share ``span`` of a kernel, by what is known before it runs."""
    return 1 if span.is_too_short_for_threads() else parallel_num_threads()


def share_span(function: KernelFunction, span: Span) -> None:
    """Let threads share what ``function`` writes for them, if that pays when it runs."""
    steps = function.text(span.end - span.first)
    share(function, f"{steps} * INT64_C({span.work_per_step})")


def share(function: KernelFunction, work: str) -> None:
    """Let threads share ``work``, counted in results of operators, if that pays when it runs."""
    expected = f"INT64_C({MARGIN_NANOSECONDS}) + {work} * {NANOSECONDS_PER_RESULT}"
    state = f"{function.name}_threads"
    function.declare(SOURCE, f"static ScanThreads {state};")
    worth = f"{work} >= {spans.WORK_FOR_THREADS}"
    function.code.writeline(f"ScanSharing sharing({state}, {worth}, {expected});")
    function.share_if("sharing.shares")
