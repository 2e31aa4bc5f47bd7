"""What Python answers of a number that steps make, and Dynamo otherwise of the tensor that it is."""

from __future__ import annotations

import pytest
import torch
from oracle import written_loop

from torch_scan_hop import NotTraceableError, fallback, scan

pytestmark = pytest.mark.torch_version

SCALES = {0: 1.0, 2: 3.0, 3: 4.0}
TABLE = torch.tensor([[1.0, 3.0], [9.0, 5.0]])

_KEYS, _DIMENSION = "keys of a dict or a set", "torch.where"
#: asked of a number, and a tensor; what is None is captured, and of others the reason has these words
QUESTIONS = {
    "in a set": (lambda n, x: x * (n in {1, 2}), _KEYS),
    "in a dict": (lambda n, x: x * (n in SCALES), _KEYS),
    "get": (lambda n, x: x * SCALES.get(n, 7.0), _KEYS),
    "a pair": (lambda n, x: x * ((n, 1) in {(1, 1)}), _KEYS),
    "a set of it": (lambda n, x: x * len({n, 1}), _KEYS),
    "a dict of it": (lambda n, x: x * {n: 5.0, 1: 6.0}.get(1, 0.0), _KEYS),
    "is True": (lambda n, x: x * ((n > 1) is True), "Write =="),
    "is not False": (lambda n, x: x * ((n > 1) is not False), "Write =="),
    "is None": (lambda n, x: x * (1 if n is None else 2), None),
    "hasattr": (lambda n, x: x * (2 if hasattr(n, "shape") else 3), None),
    "is_tensor": (lambda n, x: x * (2 if torch.is_tensor(n) else 3), None),
    "a dimension of max": (lambda n, x: x * TABLE.max(n % 2)[0][0], _DIMENSION),
    "a dimension of min": (lambda n, x: x * torch.min(TABLE, n % 2)[0][0], _DIMENSION),
}
#: known of a counter
KNOWN = {question for question, (_, words) in QUESTIONS.items() if words in (_KEYS, _DIMENSION)}


def in_the_carry(asked):
    return lambda n, x: (n + 1, asked(n, x)), 0


def in_an_attribute(asked):
    module = torch.nn.Module()
    module.n = 0

    def cell(c, x):
        y = asked(module.n, x)
        module.n += 1
        return c, y

    return cell, torch.zeros(())


def read_from_a_tensor(asked):
    return lambda n, x: (n + 1, asked(n.item(), x)), torch.tensor(0)


@pytest.mark.parametrize("made", [in_the_carry, in_an_attribute, read_from_a_tensor])
@pytest.mark.parametrize("question", QUESTIONS)
def test_as_python_answers(question, made):
    asked, words = QUESTIONS[question]
    xs = torch.full((4,), 1.5)
    if words is None or (question in KNOWN and made is not read_from_a_tensor):
        with fallback("error"):
            found = scan(*made(asked), xs)
    else:
        if made is read_from_a_tensor:  # the reason is what reads it
            words = "cannot be traced"
        with fallback("error"), pytest.raises(NotTraceableError, match=words):
            scan(*made(asked), xs)
        with fallback("allow"):
            found = scan(*made(asked), xs)
    torch.testing.assert_close(found[1], written_loop(*made(asked), xs)[1])
