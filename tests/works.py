"""README's table "What works where", whose last column is filled from the marks of the tests.

A test that shows that something works says so: ``@pytest.mark.works("AOTInductor")``, on a function
or in a file's ``pytestmark``. ``python tests/works.py`` fills the column in; a row without a test
says "not tested", and one whose tests run on a GPU only, or are slow, says that, too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
README = TESTS.parent / "README.md"
TABLE = re.compile(r"(?<=\| what \| \| shown by \|\n\|---\|---\|---\|\n)(\|.*\n)+")
NOT_TESTED = "not tested"
#: marks of tests that a plain run leaves out, and how the table says so
LEFT_OUT = {"gpu": "on a GPU only", "slow": "slow"}


def _marks(node: ast.AST) -> Iterator[ast.expr]:
    """The marks of a function, or of a file."""
    for child in node.body if isinstance(node, ast.Module) else ():
        if isinstance(child, ast.Assign) and ast.unparse(child.targets[0]) == "pytestmark":
            value = child.value
            yield from value.elts if isinstance(value, ast.List) else [value]
    yield from getattr(node, "decorator_list", ())


def _names(marks: Iterator[ast.expr]) -> tuple[list[str], set[str]]:
    """What a test shows to work, and which plain marks it has."""
    shown: list[str] = []
    plain: set[str] = set()
    for mark in marks:
        found = re.fullmatch(r"pytest\.mark\.(\w+)(?:\((.*)\))?", ast.unparse(mark))
        if found and found[1] == "works":
            assert isinstance(mark, ast.Call)
            shown += [ast.literal_eval(argument) for argument in mark.args]
        elif found:
            plain.add(found[1])
    return shown, plain


def shown_by() -> dict[str, dict[str, set[str]]]:
    """For each thing that works the files whose tests show it, and what leaves those out."""
    found: dict[str, dict[str, set[str]]] = {}
    for file in sorted(TESTS.rglob("test_*.py"), key=lambda file: file.stem):
        tree = ast.parse(file.read_text())
        of_file, plain_of_file = _names(_marks(tree))
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            shown, plain = _names(_marks(node))
            left_out = (plain | plain_of_file) & LEFT_OUT.keys()
            for what in {*shown, *of_file}:
                files = found.setdefault(what, {})
                # a file is left out as a whole only if each of its tests is
                files[file.stem] = files.get(file.stem, left_out) & left_out
    return found


def cell(files: dict[str, set[str]]) -> str:
    names = []
    for name, left_out in files.items():
        why = ", ".join(LEFT_OUT[mark] for mark in sorted(left_out))
        names.append(f"`{name}`" + (f" ({why})" if why else ""))
    return ", ".join(names) or NOT_TESTED


def rows_of_table(readme: str) -> list[str]:
    (table,) = TABLE.finditer(readme)
    return table[0].splitlines(keepends=True)


def filled(readme: str) -> str:
    shown = shown_by()
    rows = []
    for row in rows_of_table(readme):
        what, said = (part.strip() for part in row.split("|")[1:3])
        rows.append(f"| {what} | {said} | {cell(shown.pop(what.replace('`', ''), {}))} |\n")
    assert not shown, f"README's table has no row for {sorted(shown)}"
    return TABLE.sub(lambda _: "".join(rows), readme)


if __name__ == "__main__":
    README.write_text(filled(README.read_text()))
