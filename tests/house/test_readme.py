"""The README's example runs, and what it names exists."""

from __future__ import annotations

import re

import pytest
import torch
import works
from works import NOT_TESTED, filled, rows_of_table

import torch_scan_hop

README = works.README.read_text()


def test_the_five_line_example():
    example = re.search(r"```python\n(import torch.*?)```", README, re.DOTALL)
    assert example is not None
    namespace: dict[str, object] = {}
    exec(example[1], namespace)
    assert namespace["hs"].shape == (100, 4, 16)
    assert namespace["w"].grad is not None and namespace["u"].grad is not None


def test_names_in_the_readme_exist():
    for path in set(re.findall(r"`torch_scan_hop((?:\.\w+)+)", README)):
        target = torch_scan_hop
        for name in path.strip(".").split("."):
            target = getattr(target, name)  # of the package alone: nothing else was imported
    assert torch.ops.higher_order.scan is not None


def test_what_works_is_what_tests_show():
    assert filled(README) == README, "run python tests/works.py, and read what changed"


def test_a_row_claims_what_a_test_shows_and_nothing_else():
    rows = [[part.strip() for part in row.split("|")[1:-1]] for row in rows_of_table(README)]
    assert len(rows) >= 10
    for what, said, shown in rows:
        assert bool(said) == (shown != NOT_TESTED), what


def test_a_mark_that_the_table_lacks_is_noticed():
    (row,) = (row for row in rows_of_table(README) if row.startswith("| AOTInductor"))
    with pytest.raises(AssertionError, match=r"no row for \['AOTInductor'\]"):
        filled(README.replace(row, ""))
