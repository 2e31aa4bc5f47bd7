"""Which private names of torch the package uses, and the package without one of them.

The list is read from the source, so that a new import joins by itself. :func:`taken` lets modules
of this package, and nobody else, find that a name is gone; torch itself stays whole.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib.abc
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent.parent / "torch_scan_hop"
ROOTS = ("torch", "torch_xla")


def is_private(path: str) -> bool:
    """Of torch, and with an underscore somewhere; the registry of pytrees is public in all but name."""
    parts = path.split(".")
    names = [p for p in parts[1:] if p.startswith("_") and not p.startswith("__")]
    return parts[0] in ROOTS and bool(names) and parts[:3] != ["torch", "utils", "_pytree"]


def imported(node: ast.AST) -> dict[str, str]:
    """What of torch an import binds: the path of each name."""
    if isinstance(node, ast.Import):
        pairs = [(a.asname, a.name if a.asname else a.name.split(".")[0]) for a in node.names]
        return {name or path: path for name, path in pairs if path.split(".")[0] in ROOTS}
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ROOTS:
        return {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return {}


class Names(ast.NodeTransformer):
    """Finds the private names of a module; and takes ``gone`` away from it."""

    def __init__(self, tree: ast.AST, gone: str | None = None) -> None:
        self.found: set[str] = set()
        self.gone = gone
        self.modules: dict[str, str] = {}
        self.constants: dict[str, str] = {}
        for node in ast.walk(tree):
            self._learn(node)

    def _learn(self, node: ast.AST) -> None:
        for name, path in imported(node).items():
            if isinstance(node, ast.Import) or is_module(path):
                self.modules[name] = path
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Attribute):
            path = self._path(node.value)  # hooks = torch._C._autograd
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if path is not None and is_module(path):
                self.modules |= {t.id: path for t in targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                if isinstance(target, ast.Name) and isinstance(node.value.value, str):
                    self.constants[target.id] = node.value.value

    def _path(self, node: ast.AST) -> str | None:
        """``torch._C._x`` of the expression that says so."""
        if isinstance(node, ast.Name):
            return self.modules.get(node.id)
        if isinstance(node, ast.Attribute):
            above = self._path(node.value)
            return above and f"{above}.{node.attr}"
        is_import = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module")
        if is_import and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant):
                return str(name.value)
            if isinstance(name, ast.Name):
                return self.constants.get(name.id)
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        for alias in node.names:
            path = f"{node.module}.{alias.name}"
            if is_private(path):
                self.found.add(path)
                if path == self.gone:
                    text = f"cannot import name {alias.name!r} from {node.module!r}"
                    return ast.parse(f"raise ImportError({text!r}, name={node.module!r})").body[0]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        path = self._path(node)
        if path is None:
            return self.generic_visit(node)
        if is_private(path) and isinstance(node.ctx, ast.Load) and not is_module(path):
            self.found.add(path)
            if path == self.gone:
                return ast.parse(f"__gone__({path!r})", mode="eval").body
        return node


def is_module(path: str) -> bool:
    """Whether it is, or would be, imported as a module."""
    if path in sys.modules:
        return path != "torch._higher_order_ops.scan"
    with contextlib.suppress(ImportError, AttributeError, ValueError):
        return importlib.util.find_spec(path) is not None
    return False


@functools.cache
def private_names() -> dict[str, list[str]]:
    """Each with the modules of this package that use it."""
    users: dict[str, list[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(file.read_text())
        names = Names(tree)
        names.visit(tree)
        module = str(file.relative_to(PACKAGE).with_suffix("")).replace("/", ".")
        held = classes_held(tree) if module.startswith("_torch.") else set()
        for name in names.found | held:
            users.setdefault(name, []).append(module)
    return dict(sorted(users.items()))


#: of what variables of these names are, all over Dynamo and Inductor, and methods are called
HELD = {
    "tx": "torch._dynamo.symbolic_convert.InstructionTranslatorBase",
    "tx.output": "torch._dynamo.output_graph.OutputGraph",
    "tx.output.side_effects": "torch._dynamo.side_effects.SideEffects",
    "tx.output.current_tracer": "torch._dynamo.output_graph.SubgraphTracer",
    "effects": "torch._dynamo.side_effects.SideEffects",
    "variable": "torch._dynamo.variables.base.VariableTracker",
    "V.graph": "torch._inductor.graph.GraphLowering",
    "wrapper": "torch._inductor.codegen.wrapper.PythonWrapperCodegen",
}


def class_held(call: ast.AST) -> str | None:
    """Of the object whose method a call is of."""
    is_method = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
    return HELD.get(ast.unparse(call.func.value)) if is_method else None  # type: ignore[attr-defined]


def classes_held(tree: ast.AST) -> set[str]:
    return set(filter(None, map(class_held, ast.walk(tree))))


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, gone: str) -> None:
        self.loader = loader
        self.gone = gone

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        tree = ast.parse(Path(self.loader.path).read_text())
        without = ast.fix_missing_locations(Names(tree, self.gone).visit(tree))
        exec(compile(without, self.loader.path, "exec"), vars(module))
        if module.__name__ == "torch_scan_hop._torch.forms":
            resolve, gone = module.resolve, self.gone
            module.resolve = lambda path, *how: _gone(path) if path == gone else resolve(path, *how)  # type: ignore[attr-defined]


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, gone: str) -> None:
        self.gone = gone
        users = {"_torch.forms", *private_names()[gone]}
        self.modules = {f"torch_scan_hop.{user}".removesuffix(".__init__") for user in users}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.modules:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if getattr(spec.loader, "path", "").endswith(".py"):
                    spec.loader = _Loader(spec.loader, self.gone)
                return spec
        return None


def _gone(path: str) -> Any:
    above, _, name = path.rpartition(".")
    raise AttributeError(f"module {above!r} has no attribute {name!r}", name=name)


def take_away(name: str) -> None:
    """From now on, for this process's import of the package."""
    assert not any(m.startswith("torch_scan_hop") for m in sys.modules)
    builtins.__gone__ = _gone  # type: ignore[attr-defined]
    sys.meta_path.insert(0, _Finder(name))


# --- the table that the package reads ---

TABLE = PACKAGE / "_torch" / "private_names.json"
CHECKED = ("2.9.1", "2.13.0", "2.15.0")

#: the modules of ``_torch`` that each capability is made of; ``dynamo.`` stands for the others of
#: that folder. Some import Dynamo when they are called.
SHIMS: dict[str, set[str]] = {
    "operator": {
        "captured_regions", "custom_functions", "fakes", "function_modes", "functorch_levels",
        "isolation", "modules", "operators", "selective_checkpoints", "sizes", "symbols",
        "tracing", "transforms", "writes",
    },
    "capture": {"dynamo.", "inference_regions", "symbols"},
    "own_scan": {"own_scan", "dynamo.torchs_scan"},
    "counted_loop": {
        "inductor", "inductor_checks", "inductor_inline", "inductor_passes", "inductor_values",
    },
    "vectors_of_bools": {"inductor_bools"},
    "cpu_kernels": {"inductor_cpp", "inductor_reductions", "inductor_vectors", "onednn"},
    "gpu_kernels": {"inductor_reductions", "inductor_triton", "triton_launch"},
    "sharding": {"dtensors"},
    "xla": {"xla"},
    "explain": {"inductor_dry_run", "triton_code"},
    "absent_gpu": {"absent_gpu", "engine_in_python"},
}  # fmt: skip


def used_by_shim() -> dict[str, list[str]]:
    users: dict[str, list[str]] = {}
    for name, modules in private_names().items():
        for module in modules:
            users.setdefault(module.removeprefix("_torch."), []).append(name)
    return dict(sorted(users.items()))


def capabilities_of(shim: str) -> list[str]:
    """Those that a module of ``_torch`` is a part of."""
    named = [name for name, shims in SHIMS.items() if shim in shims]
    return named or ["capture"] * shim.startswith("dynamo.")


def used_by_capability() -> dict[str, list[str]]:
    """Without those that another capability, which it needs, has looked for already."""
    from torch_scan_hop._torch.capabilities import CAPABILITIES

    users: dict[str, set[str]] = {}
    for shim, names in used_by_shim().items():
        for capability in capabilities_of(shim):
            users.setdefault(capability, set()).update(names)
    for name, capability in CAPABILITIES.items():
        for other in capability.needs:
            if name in users and CAPABILITIES[other].imports:
                users[name] -= users[other]
    return {name: sorted(users[name]) for name in SHIMS if users.get(name)}


def written() -> str:
    """The table, with what this torch says of its names."""
    import torch
    from private_forms import forms

    from torch_scan_hop._torch.forms import CALLED, ONLY_IN, REPLACED, resolve

    version = torch.__version__.partition("+")[0]
    called, replaced = forms(CALLED, REPLACED)
    entries = {name: f"({sites})" for name, sites in called.items()}
    entries |= {name: f"{entries.get(name, '')}[{own}]" for name, own in replaced.items()}
    only = {}
    for name in sorted({*private_names(), *called, *replaced}):
        have = set(ONLY_IN.get(name, " ".join(CHECKED)).split()) - {version}
        with contextlib.suppress(ImportError, AttributeError):
            resolve(name)
            have.add(version)
        if have != set(CHECKED):
            only[name] = " ".join(v for v in CHECKED if v in have)
    table = {
        "versions": "2.9 to 2.15",
        "checked": " ".join(CHECKED),
        "only in": only,
        "names": {
            name: _rows(dict.fromkeys(names, "")) for name, names in used_by_capability().items()
        },
        "forms": _rows(dict(sorted(entries.items()))),
    }
    return json.dumps(table, indent=1) + "\n"


def _rows(forms: dict[str, str]) -> dict[str, str]:
    """For each owner its names, each with its form."""
    rows: dict[str, list[str]] = {}
    for path, form in forms.items():
        owner, _, name = path.rpartition(".")
        rows.setdefault(owner, []).append(f"{name}{form}")
    return {owner: " ".join(names) for owner, names in rows.items()}


if __name__ == "__main__":
    sys.path.insert(0, str(PACKAGE.parent))
    TABLE.write_text(written())
