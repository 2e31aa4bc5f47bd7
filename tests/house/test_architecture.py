"""The rules of ARCHITECTURE.md that a program can check."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import slow_tests

import torch_scan_hop

PACKAGE = Path(torch_scan_hop.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = {
    ".".join(("torch_scan_hop", *f.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): f
    for f in FILES
}


def imported_by(node: ast.AST) -> set[str]:
    """The modules of this package that an import statement names."""
    found: set[str] = set()
    if isinstance(node, ast.ImportFrom) and node.module:
        paths = (f"{node.module}.{alias.name}" for alias in node.names)
        found = {path if path in NAMES else node.module for path in paths}
    elif isinstance(node, ast.Import):
        found = {alias.name for alias in node.names}
    return found & NAMES.keys()


def imported(file: Path) -> set[str]:
    """The modules of this package that ``file`` imports anywhere but for type checkers."""
    return set().union(*map(imported_by, running(ast.parse(file.read_text()))))


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


def given_by(tree: ast.AST) -> set[str]:
    """The names that a module has, as far as its source says so."""
    found: set[str] = set()
    for node in running(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


GIVEN = {name: given_by(ast.parse(file.read_text())) for name, file in NAMES.items()}
REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("folder", ["torch_scan_hop", "tests", "benchmarks", "examples"])
def test_what_is_imported_is_there(folder):
    """In functions, too, which run on some machines only."""
    absent = set()
    for file in (REPOSITORY / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            module = getattr(node, "module", None) or ""
            if not isinstance(node, ast.ImportFrom) or module.split(".")[0] != "torch_scan_hop":
                continue
            for name in (alias.name for alias in node.names):
                if f"{module}.{name}" not in NAMES and name not in GIVEN.get(module, ()):
                    absent.add(f"{file.name}: {module}.{name}")
    assert not absent


def imported_at_once(tree: ast.AST) -> set[str]:
    """What a module imports when it is imported: not in a function."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        found |= imported_by(node)
        if not isinstance(node, ast.FunctionDef):
            found |= imported_at_once(node)
    return found


AT_ONCE = {name: imported_at_once(ast.parse(file.read_text())) for name, file in NAMES.items()}


def loaded_with(name: str) -> set[str]:
    loaded: set[str] = set()
    left = [name]
    while left:
        module = left.pop()
        if module not in loaded:
            loaded.add(module)
            left += AT_ONCE[module]
    return loaded


TO_NO_END = {
    # lists all that it registers in one place, most of which does need Inductor
    "torch_scan_hop.inductor": "_register",
    # is imported without the operator, too, and then without private names of torch
    "torch_scan_hop.capture.reasons": "setting_of",
}


def test_a_function_imports_what_is_not_loaded_anyway():
    """An import in a function says: this takes its time, or its dependency is not always there."""
    always = loaded_with("torch_scan_hop")
    assert "torch_scan_hop.op" in always and "torch_scan_hop.capture.variables" not in always
    for name, file in NAMES.items():
        loaded = always | loaded_with(name)
        for function in ast.walk(ast.parse(file.read_text())):
            if not isinstance(function, ast.FunctionDef) or TO_NO_END.get(name) == function.name:
                continue
            in_vain = loaded & set().union(*map(imported_by, ast.walk(function)))
            assert not in_vain, (name, function.name)


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
    # reads public names alone
    "torch_scan_hop._torch.dynamo.methods": {"torch_scan_hop.capture.replaced_methods"},
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


#: what a user or a newcomer looks for; all else is in a package that says what it is about
AT_THE_TOP = {
    # what users call, set and read
    *("api", "arguments", "layers", "graphs", "errors", "fallback", "settings", "debugging"),
    *("progress_bar", "versions"),
    # the package where torch lacks what the operator needs
    "plain",
    # what every backend does with its large stacks
    "huge_pages",
    # what every rewrite calls, for the checker of the tests
    "legality",
    # what a scan means
    *("reference", "step", "tree"),
    # the operator and the roles of its arguments
    *("op", "signature"),
}


def test_the_top_of_the_package_is_what_users_look_for():
    assert {f.stem for f in PACKAGE.glob("*.py")} == AT_THE_TOP | {"__init__"}


MAP = (REPOSITORY / "ARCHITECTURE.md").read_text()


def test_the_map_names_every_package_and_module_at_the_top():
    packages = {f.parent.name for f in PACKAGE.glob("*/__init__.py")}
    assert {"capture", "body", "schedule"} <= packages
    named = set(re.findall(r"`([\w/]+)`", MAP))
    assert not {f"{name}/" for name in packages} - named
    assert not AT_THE_TOP - named


def test_the_map_names_nothing_that_is_not_there():
    roots = {p.name for p in PACKAGE.iterdir() if p.is_dir()}
    named = {n for n in re.findall(r"`(\w+(?:/\w+)+)`", MAP) if n.split("/")[0] in roots}
    assert named
    assert not {n for n in named if not any(PACKAGE.glob(f"{n}*"))}


#: classes of one name in two modules: why
TWINS = {
    "ForwardBackward": "what forward_and_backward gives, in graphs and in vjp, which stands alone",
    "Explanation": "of explain, and its place where that is refused, in plain",
    "Place": "where a key points (capture/indexing), where a kernel's value is (inductor/cpu)",
}


def test_a_name_stands_for_one_class():
    """The compilers of two devices have the same parts, and call them the same."""
    modules: dict[str, set[str]] = {}
    for name, file in NAMES.items():
        where = re.sub(r"\.inductor\.(cpu|gpu)\..*", ".inductor", name)
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules.setdefault(node.name, set()).add(where)
    assert {name for name, places in modules.items() if len(places) > 1} == TWINS.keys()


def lines_of(function: ast.FunctionDef) -> int:
    docstring = ast.get_docstring(function, clean=False) or ""
    length = (function.end_lineno or 0) - function.lineno + 1
    return length - len(docstring.splitlines())


#: files above 300 lines (``eager/writer``) and functions above 40 (``api:scan_tree``): why
LONG: dict[str, str] = {}


def test_what_is_long_says_why():
    """A smell; what is named without being long is out of date."""
    long = set()
    for name, file in NAMES.items():
        text = file.read_text()
        path = name.removeprefix("torch_scan_hop.").replace(".", "/")
        long |= {path} if len(text.splitlines()) > 300 else set()
        functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
        long |= {f"{path}:{n.name}" for n in functions if lines_of(n) > 40}
    assert long == LONG.keys()


def test_docstrings_are_no_part_of_a_functions_length():
    source = 'def f():\n    """Two\n    lines."""\n    return 1\n'
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef) and lines_of(function) == 2


def test_every_test_that_is_listed_as_slow_exists():
    functions: dict[str, set[str]] = {}
    for name in slow_tests.listed():
        file, *_, function = name.split("[")[0].split("::")
        functions.setdefault(file, set()).add(function)
    for file, named in functions.items():
        if not file.startswith("tests/"):  # a doctest
            continue
        defined = set(
            re.findall(r"^ *def (test_\w+)", (REPOSITORY / file).read_text(), re.MULTILINE)
        )
        assert named <= defined, file
