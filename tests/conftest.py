"""Every test starts from the same seed, compiles what it runs, and leaves no compiled code behind.

What every rewrite makes is checked (``tests/legality``), but where a test breaks parts
of the package on purpose; with UNCHECKED in the environment nothing is, to see what it costs.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import os
import sys
from unittest import mock

import pytest
import slow_tests
import torch
from graph_caches import graph_caches
from legality.checker import Checker, checking
from torch._dynamo import bytecode_transformation

from torch_scan_hop import api
from torch_scan_hop.capture import replay
from torch_scan_hop.capture.reasons import forget_refusals
from torch_scan_hop.eager import few_steps
from torch_scan_hop.fallback import forget_reasons

SECONDS_TO_END = 300


def pytest_configure(config):
    # a scan that ran as a Python loop proves nothing about the operator
    config.addinivalue_line("filterwarnings", "error:torch_scan_hop")


@pytest.hookimpl(tryfirst=True)  # before `-m` is read
def pytest_collection_modifyitems(items):
    are_slow = slow_tests.listed()
    for item in items:
        if item.nodeid in are_slow:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish(session):
    """Tracing makes many objects, and what is imported by now stays.

    With Python's own thresholds a fifth of the tests' time goes into looking through it again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_sessionfinish(session):
    # What keeps a process from ending after its last test has no test that could fail for it.
    faulthandler.dump_traceback_later(SECONDS_TO_END, exit=True, file=sys.__stderr__)
    gc.unfreeze()  # C extensions say which of their objects are left at the end


@pytest.fixture(scope="session", autouse=True)
def _guards_are_not_timed():
    """After each capture Dynamo times its guards, for its log: it empties the processor's caches
    first, which takes 40 ms, and they are those of the other worker too."""
    with mock.patch("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0):
        yield


@pytest.fixture(scope="session", autouse=True)
def _code_is_read_once():
    """Dynamo keeps the instructions of the last 128 functions, of which one capture has more."""
    read = bytecode_transformation._cached_cleaned_instructions
    kept = functools.cache(read.__wrapped__)
    with mock.patch.object(bytecode_transformation, read.__name__, kept):
        yield


@pytest.fixture(scope="session")
def _checker():
    """One for all tests: what operators give is asked once."""
    return Checker()


@pytest.fixture(autouse=True)
def legality_checker(request, _checker):
    """What a rewrite broke fails the test, whoever caught the error: users' programs run on."""
    if "faults" in request.keywords or "UNCHECKED" in os.environ:
        yield None
        return
    with checking(_checker):
        yield _checker
    violations = list(_checker.violations)
    _checker.forget()
    if violations:
        raise violations[0]


@pytest.fixture(autouse=True)
def _few_steps_are_planned(request):
    """Tests have few steps, and are to test what more of them run."""
    if "few_steps" in request.keywords:
        yield
        return
    with mock.patch.object(few_steps, "MAX_STEPS", 0):
        yield


@pytest.fixture(autouse=True)
def _eager_scans_are_unrolled(request):
    """Eager mode has no use for ``unroll``, but is the quickest way to test what it makes."""
    if "eager_unroll" in request.keywords:
        yield
        return
    with mock.patch.object(api, "_as_eager_mode_runs", lambda schedule, *_: schedule):
        yield


@pytest.fixture(autouse=True)
def _no_rewrite_is_dropped(request, caplog):
    """What fails on the way is left out and logged: right for users, and a bug all the same."""
    yield
    if "faults" in request.keywords:
        return
    dropped = [r for r in caplog.get_records("call") if r.name.startswith("torch_scan_hop")]
    assert not dropped, dropped[0].getMessage()


@pytest.fixture
def nothing_captured():
    """No body has been captured or refused before, as those of tests that share their code are."""
    forget_refusals()
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _fresh_torch():
    torch.manual_seed(0)
    forget_reasons()
    with graph_caches(False):
        yield
    torch._dynamo.reset()
    replay._entries.clear()
