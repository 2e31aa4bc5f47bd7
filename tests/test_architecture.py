"""The rules of ARCHITECTURE.md that a program can check."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import torch_scan_hop

PACKAGE = Path(torch_scan_hop.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = {
    ".".join(("torch_scan_hop", *f.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): f
    for f in FILES
}


def imported(file: Path) -> set[str]:
    """The modules of this package that ``file`` imports anywhere but for type checkers."""
    found: set[str] = set()
    for node in running(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            paths = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {path if path in NAMES else node.module for path in paths}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & NAMES.keys()


def running(tree: ast.AST):
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        yield from running(node)


IMPORTS = {name: imported(file) - {name} for name, file in NAMES.items()}


def test_the_files_are_found():
    assert {"torch_scan_hop.api", "torch_scan_hop.op", "torch_scan_hop.eager"} <= NAMES.keys()
    assert "torch_scan_hop.op" in IMPORTS["torch_scan_hop.api"]


def test_no_circle_of_imports():
    """Imports in functions count: what needs one to break a circle is in the wrong place."""
    left = {name: set(others) for name, others in IMPORTS.items()}
    while leaves := [name for name, others in left.items() if not others & left.keys()]:
        for name in leaves:
            del left[name]
    assert not left, f"in or above a circle: {sorted(left)}"


# what Inductor and Dynamo keep of the graph at hand, which objects that they hand out lead to
OF_THE_GRAPH_AT_HAND = r"\bV\.[a-z]|\btx\.output\b|\b_cdata\b"

# torch's registry of pytrees is the one that users register theirs with, whatever its name says
PRIVATE = r"\b(torch|torch_xla)(\.\w+)*\.(?!_pytree\b)_[a-z]|from torch\S* import _(?!pytree\b)"


@pytest.mark.parametrize("name", sorted(n for n in NAMES if "._torch" not in n))
def test_private_names_of_torch_are_in_one_package(name):
    code = [line.partition("#")[0].strip() for line in NAMES[name].read_text().splitlines()]
    assert not [line for line in code if re.search(f"{PRIVATE}|{OF_THE_GRAPH_AT_HAND}", line)]


def test_private_names_would_be_found():
    text = NAMES["torch_scan_hop._torch.operators"].read_text()
    assert len(re.findall(PRIVATE, text)) > 10
    shims = (
        NAMES[f"torch_scan_hop._torch.{name}"].read_text()
        for name in ("inductor", "dynamo.variables")
    )
    assert all(re.search(OF_THE_GRAPH_AT_HAND, text) for text in shims)


EXCEPTIONS = {
    # what it traces is checked in tests
    "torch_scan_hop._torch.tracing": {"torch_scan_hop.legality"},
    # writes calls of these functions into Dynamo's graphs
    "torch_scan_hop._torch.dynamo.indexing": {
        "torch_scan_hop.capture.indexing",
        "torch_scan_hop.capture.index_nodes",
    },
}


def test_the_shims_know_nothing_of_this_package():
    for name, others in IMPORTS.items():
        if name.startswith("torch_scan_hop._torch"):
            own = {o for o in others if o.startswith("torch_scan_hop._torch")}
            known = {"torch_scan_hop.errors"} | EXCEPTIONS.get(name, set())
            assert others - own <= known, name


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_what_is_of_one_device_is_reached_through_the_tuple_of_kernels(device):
    package = f"torch_scan_hop.inductor.{device}"
    assert any(name.startswith(package) for name in IMPORTS)
    for name, others in IMPORTS.items():
        if not name.startswith(package):
            used = {o for o in others if o.startswith(package)}
            # the one chooses, the other says why a kernel was not chosen
            known = {"torch_scan_hop.inductor.kernels", "torch_scan_hop.explain.kernels"}
            assert not used or name in known, name


def test_nobody_imports_the_kernels_but_the_face_of_the_package():
    for name, others in IMPORTS.items():
        if not name.startswith("torch_scan_hop.dispatch") and name != "torch_scan_hop":
            assert not {o for o in others if o.startswith("torch_scan_hop.dispatch")}, name


MAP = (Path(__file__).parent.parent / "ARCHITECTURE.md").read_text()


def lines_of(function: ast.FunctionDef) -> int:
    docstring = ast.get_docstring(function, clean=False) or ""
    length = (function.end_lineno or 0) - function.lineno + 1
    return length - len(docstring.splitlines())


def test_what_is_long_says_why():
    """Files above 300 lines and functions above 40: a smell, unless the map has a reason."""
    long = []
    for name, file in NAMES.items():
        text = file.read_text()
        path = name.removeprefix("torch_scan_hop.").replace(".", "/")
        long += [path] if len(text.splitlines()) > 300 else []
        functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
        long += [f"{path}:{n.name}" for n in functions if lines_of(n) > 40]
    unexplained = [name for name in long if f"`{name}`" not in MAP]
    assert long and not unexplained
