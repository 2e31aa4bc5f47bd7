"""The public ``scan``: pytrees, dimensions and validation around the flat operator."""

from __future__ import annotations

import functools
from typing import Any

import torch

from torch_scan_hop import tree
from torch_scan_hop._torch import capabilities
from torch_scan_hop._torch.operators import current_dispatch_mode
from torch_scan_hop._torch.transforms import collect_failed_trace, in_plain_eager
from torch_scan_hop.arguments import checked_call, stacked_along
from torch_scan_hop.capture.appending import with_rows_appended
from torch_scan_hop.capture.reasons import remember_reason, remembered_reason, setting_of
from torch_scan_hop.capture.records import without_records
from torch_scan_hop.capture.replay import NotCaptured, call_captured, check_captured
from torch_scan_hop.capture.steady import steady_scan
from torch_scan_hop.capture.traced_operators import scan_of_numbers, staying_numbers
from torch_scan_hop.capture.user_code import PACKAGE, code_of, name_of, users_frames
from torch_scan_hop.debugging import check_results, debugged_loop, is_debugging
from torch_scan_hop.eager.views_of_xs import run_loop_because
from torch_scan_hop.errors import ScanTypeError, ScanValueError, add_note
from torch_scan_hop.fallback import announce, refuse_if_not_allowed
from torch_scan_hop.op import scan_op, scan_options
from torch_scan_hop.progress_bar import check_progress, run_with_bar
from torch_scan_hop.reference import scan_loop
from torch_scan_hop.schedule.strategies import Schedule, is_one_scan, scheduled
from torch_scan_hop.settings import check_flag, defaults
from torch_scan_hop.step import CombineFn, Run, device_of, start_of, step


def scan(
    combine_fn: CombineFn,
    init: Any,
    xs: Any = None,
    length: int | None = None,
    *,
    dim: int = 0,
    reverse: bool = False,
    unroll: int = 1,
    checkpoint: Any = None,
    compile: bool | None = None,
    progress: bool | str | None = None,
) -> tuple[Any, Any]:
    """Carry a state along a dimension: ``jax.lax.scan`` for PyTorch.

    It means the same as this loop, and runs as one operator in eager mode, under
    ``torch.compile``, in exported programs and on XLA::

        carry, ys = init, []
        for x in xs:                    # slices along dim, backwards if reverse
            carry, y = combine_fn(carry, x)
            ys.append(y)
        return carry, torch.stack(ys)   # each leaf of y, in the order of xs

    Args:
        combine_fn: ``(carry, x) -> (carry, y)`` on pytrees of tensors. It may close over
            tensors, parameters and modules (gradients flow to them), return its inputs or the
            same tensor twice, and change closed-over buffers in place. What it assigns to
            attributes is carried. The carry keeps its structure, shapes and dtypes, but may grow
            once, in the first step (from None, a number, or by broadcasting); ``y`` may be None.
        init: the first carry: a pytree of tensors, numbers and None. Never modified.
        xs: a pytree of tensors that share their size ``T`` along ``dim``; None leaves are
            passed on as None. With no tensors at all, ``length`` gives the trip count.
        length: the trip count; with ``xs`` it must agree with ``T``.
        dim: the dimension of ``xs`` that is scanned, and of ``ys`` that is stacked (0 for a
            ``y`` of too low a rank).
        reverse: run from the last x to the first; ``ys`` stay in the order of ``xs``.
        unroll: steps per iteration of a compiled loop; results do not depend on it, and eager mode
            does not need it.
        checkpoint: what the forward saves for the backward. None: what the loop would save.
            ``"full"``: carries, xs and closures only. ``"sqrt"``: about ``sqrt(T)`` carries. An
            int: that many segments, of which the carry into each is saved. A
            :class:`Binomial`: at most that many snapshots. A function: a policy for each
            operator, as for ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.
        compile: True lets Inductor compile the loop and its backward, in an eager program; what is
            around the scan stays as it is. The first call takes seconds, and so does the first one
            with a second trip count or batch size. Results may differ in the last digits, and
            random numbers differ from those in eager mode. It has no effect under transforms of
            ``torch.func``, modes and tracers, on XLA, and inside ``torch.compile``. None takes the
            default, which :func:`torch_scan_hop.set_default` sets (at first False).
        progress: True, or a label, shows a bar (of tqdm) while this call and its backward run, in
            eager mode. It has no effect inside ``torch.compile`` and on XLA; see
            :func:`torch_scan_hop.progress`, which also shows compiled scans.

    Returns:
        ``(carry, ys)``: the last carry, in the structure of ``init``, and the stacked ``y``:
        a leaf of shape ``[...]`` becomes ``[T, ...]``. Neither shares storage with the inputs.

    Raises:
        TypeError: an argument or a leaf of the wrong kind, or a carry whose structure or dtype
            changes at every step; the message names the leaf, for example ``carry['h']``.
        ValueError: sizes, lengths or dimensions that do not fit.

    Example:
        >>> def cell(h, x):
        ...     h = torch.tanh(h + x)
        ...     return h, h
        >>> h, hs = scan(cell, torch.zeros(2), torch.ones(3, 2))
        >>> hs.shape, bool((h == hs[-1]).all())
        (torch.Size([3, 2]), True)
    """
    by_default = defaults()
    if compile is None:
        compile = by_default.compile
    check_flag("scan", "compile", compile)
    call = checked_call(combine_fn, init, xs, length, dim, Schedule(reverse, unroll, checkpoint))
    check_progress(progress)
    if progress and not torch.compiler.is_dynamo_compiling():
        one_loop = unroll == 1 and (checkpoint in (None, "full") or callable(checkpoint))
        run = functools.partial(
            _run, combine_fn, init, call.xs, call.trip_count, call.schedule, compile
        )
        carry, ys = run_with_bar(progress, call.trip_count if one_loop else None, run)
    else:
        carry, ys = _run(combine_fn, init, call.xs, call.trip_count, call.schedule, compile)
    if by_default.detect_nonfinite:
        check_results(combine_fn, init, call.xs, call.trip_count, reverse, (carry, ys))
    return carry, stacked_along(dim, call.xs, ys)


def _run(
    combine_fn: CombineFn, init: Any, xs: Any, trip_count: Any, schedule: Schedule, compiled: bool
) -> tuple[Any, Any]:
    if torch.compiler.is_dynamo_compiling() and not capabilities.captures:
        return scan_loop(combine_fn, init, xs, trip_count, schedule.reverse)
    template, carry = start_of(init, xs)
    if torch.compiler.is_dynamo_compiling():
        return scan_tree(combine_fn, template, carry, init, xs, trip_count, schedule)
    if is_debugging():
        return debugged_loop(combine_fn, init, xs, trip_count, schedule.reverse)
    if torch.jit.is_tracing():  # deprecated, and its check compares two runs, node by node
        refuse_if_not_allowed(combine_fn, _JIT_TRACE)
        announce(combine_fn, _JIT_TRACE)
        return scan_loop(combine_fn, init, xs, trip_count, schedule.reverse)
    given = (init, xs, compiled) if compiled else (init, xs)  # a compiler takes more
    reason, is_lasting, is_told = remembered_reason(combine_fn, given, template), False, False
    if reason is None:
        try:
            how = schedule if compiled else _as_eager_mode_runs(schedule, init, xs)
            args = (template, carry, init, xs, trip_count, how, True)
            ran = call_captured(scan_tree, combine_fn, *args, compiled=compiled)
            return with_rows_appended(ran, schedule.reverse)
        except NotCaptured as error:
            reason, is_lasting, is_told = error.reason, error.is_lasting, error.is_told
        if is_lasting:  # or nothing was traced
            collect_failed_trace()
    if current_dispatch_mode() is not None:  # it is there to see every operator, of a loop, too
        if torch.compiler.is_exporting():  # an exported program would hold every step
            refuse_if_not_allowed(combine_fn, reason)
            if not is_told:
                announce(combine_fn, reason)
        return run_loop_because(reason, combine_fn, init, xs, trip_count, schedule.reverse)
    refuse_if_not_allowed(combine_fn, reason)
    setting = setting_of(combine_fn, given) if is_lasting else None
    result = _run_in_python(reason, combine_fn, init, xs, trip_count, schedule.reverse)
    if is_lasting:
        remember_reason(combine_fn, setting, reason)
    if not is_told:
        announce(combine_fn, reason)
    return result


def _as_eager_mode_runs(schedule: Schedule, init: Any, xs: Any) -> Schedule:
    """Return the schedule without blocks of steps, if no compiler sees them: each operator is a
    call, and ys would only be stacked twice."""
    if schedule.unroll == 1 or not in_plain_eager() or device_of(init, xs).type == "xla":
        return schedule
    return schedule._replace(unroll=1)


_JIT_TRACE = "torch.jit.trace records the operators of every step; use torch.export"


def _run_in_python(
    reason: str, combine_fn: CombineFn, init: Any, xs: Any, trip_count: Any, reverse: bool
) -> tuple[Any, Any]:
    """Run the loop, and let its errors show the caller's lines and not ours above them."""
    try:
        return run_loop_because(reason, combine_fn, init, xs, trip_count, reverse)
    except (ScanTypeError, ScanValueError) as error:
        code = code_of(combine_fn)
        # The name is not said twice, where a scan in the body has named its own function, nor where
        # that function is this package's (scan_layers) and means nothing to the caller.
        if " combine_fn is " not in str(error) and not code.co_filename.startswith(PACKAGE):
            error.args = (f"{error} combine_fn is {name_of(code)}.",)
        error.__traceback__ = users_frames(error.__traceback__)
        raise
    except Exception as error:
        if isinstance(xs, (list, tuple)) and len(xs) > 1 and isinstance(error, TypeError):
            add_note(
                error,
                f"scan: xs is a {type(xs).__name__} of {len(xs)} tensors, each of which is "
                "scanned, and x one of as many slices. To scan over it, pass torch.stack(xs).",
            )
        error.__traceback__ = users_frames(error.__traceback__)
        raise


def scan_tree(
    combine_fn: CombineFn,
    template: Any,
    carry: Any,
    init: Any,
    xs: Any,
    trip_count: Any,
    schedule: Schedule,
    is_eager: bool = False,
) -> tuple[Any, Any]:
    """Scan pytrees. Dynamo traces this; in eager mode the results are ``with_rows_appended``.

    ``template`` and ``carry`` are what ``start_of`` makes of ``init``, which is looked at only if
    the first step runs on its own: a capture that reads its numbers serves no others.
    """
    check_captured()
    appended: Any = [] if is_eager else None
    results: tuple[Any, Any] = steady_scan(
        run_scheduled, combine_fn, template, carry, init, xs, trip_count, schedule, (), appended
    )
    return (results, appended) if is_eager else results


def run_scheduled(
    combine_fn: CombineFn, template: Any, init: Any, xs: Any, trip_count: Any, schedule: Schedule
) -> tuple[Any, Any]:
    """Run the scan as one flat scan, or as several if ``schedule`` says so.

    ``template`` is what a step's carry is matched with: None for ``init``, or ``init`` with 0
    for each leaf whose dtype the step decides.
    """
    numbers_in_init, settled = template is not None, None
    if template is None:
        template = init
    elif not is_one_scan(schedule):
        # a schedule of several scans begins each with tensors: a scan of no steps finds the dtypes
        # that Python numbers in init take. Those that stay numbers keep their digits on the way.
        no_xs = tree.map_leaves(lambda leaf: leaf[:0], xs)
        settled, _ = scan_flat(combine_fn, template, init, no_xs, 0, {}, True)
        init, template = with_exact_numbers(init, settled)
        numbers_in_init = False

    def one_scan(policy: Any) -> Run:
        options = scan_options(schedule.reverse, policy)

        def run(combine_fn: CombineFn, init: Any, xs: Any, trip_count: Any) -> tuple[Any, Any]:
            return scan_flat(combine_fn, template, init, xs, trip_count, options, numbers_in_init)

        return run

    carry, ys = scheduled(one_scan, template, schedule)(combine_fn, init, xs, trip_count)
    if settled is None:
        return carry, ys
    pairs = zip(tree.tensors(carry), tree.tensors(settled), strict=True)
    return tree.unflatten(settled, [leaf.to(like.dtype) for leaf, like in pairs]), ys


def with_exact_numbers(init: Any, settled: Any) -> tuple[Any, Any]:
    """Return the carry that scans begin with, and what a step's carry is matched with."""
    exact, tensors = tree.tensors(init), tree.tensors(settled)
    flags = staying_numbers(*tensors)
    triples = list(zip(exact, tensors, flags, strict=True))
    start = [whole if stays else leaf for whole, leaf, stays in triples]
    template = [0 if stays else leaf for _, leaf, stays in triples]
    return tree.unflatten(settled, start), tree.unflatten(settled, template)


def scan_flat(
    combine_fn: CombineFn,
    template: Any,
    init: Any,
    xs: Any,
    trip_count: Any,
    options: dict[str, Any],
    numbers_in_init: bool,
) -> tuple[Any, Any]:
    """Turn pytrees into the flat operator's arguments, and its results back.

    Dynamo gives the operator's results back in the structure that ``body`` returns.
    """
    carry_leaves, x_leaves = tree.tensors(init), tree.tensors(xs)
    device = device_of(init, xs)
    n_carry, counted_only = len(carry_leaves), len(x_leaves) == 0

    def body(*flat: Any, keep_numbers: bool = False) -> Any:
        carry = tree.unflatten(init, list(flat[:n_carry]))
        x = xs if counted_only else tree.unflatten(xs, list(flat[n_carry:]))
        return step(combine_fn, carry, x, template, device, keep_numbers)

    if counted_only:
        # no xs: an empty tensor carries the trip count
        x_leaves = [torch.empty((trip_count, 0), device=device)]
    numbers = [k for k, leaf in enumerate(tree.tensors(template)) if isinstance(leaf, int)]
    if numbers and numbers_in_init:
        carry, ys = scan_of_numbers(numbers, body, carry_leaves, x_leaves, (), **options)
    else:
        carry, ys = scan_op(body, carry_leaves, x_leaves, (), **options)
    return tree.unflatten(init, list(carry)), without_records(ys)
