"""The form in which the package uses private names of torch: how it calls them, what it replaces.

Read from the source, as ``private_names`` does; the parameters' names are those of the torch that
is here.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import Any

from private_names import PACKAGE, class_held, imported, is_private

from torch_scan_hop._torch.forms import why_not_of_form

#: what is replaced by a name that a variable holds
BY_HAND = {
    "inductor_passes": (
        "torch._inductor.fx_passes.post_grad.reinplace_inplaceable_ops",
        "torch._inductor.fx_passes.post_grad.decompose_triton_kernel_wrapper_functional",
        "torch._inductor.fx_passes.post_grad.decompose_auto_functionalized",
    ),
}
SHIMS = "torch_scan_hop._torch."
#: of Python's, and of every class
PLAIN = {f"__{name}__" for name in ("init", "new", "repr", "call", "reduce", "deepcopy")}


class Uses(ast.NodeVisitor):
    """``calls``: each call of a private name; ``replaced``: what is assigned or overridden."""

    def __init__(self, tree: ast.AST, known: dict[str, str], own: set[str]) -> None:
        self.paths = dict(known)
        self.own = own | {n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
        self.calls: list[tuple[str, ast.Call, bool]] = []
        self.wraps: dict[str, str] = {}
        self.replaced: set[str] = set()
        for node in ast.walk(tree):
            self._learn(node)
        self.visit(tree)

    def _learn(self, node: ast.AST) -> None:
        self.paths |= imported(node)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            path = self.path(node.value)
            if path is not None and isinstance(targets[0], ast.Name):
                self.paths.setdefault(targets[0].id, path)

    def _wraps(self, tree: ast.AST) -> dict[str, str]:
        """The method that a function is wrapped around, by the function's name."""
        found: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("wrap", "wrapped"):
                owner = self.path(node.args[0])
                around = {ast.unparse(k.value): f"{owner}.{k.arg}" for k in node.keywords if k.arg}
                found |= around if owner else {}
        return found

    def path(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return self.paths.get(node.id)
        if isinstance(node, ast.Attribute):
            above = self.path(node.value)
            return above and f"{above}.{node.attr}"
        return None

    def visit_Call(self, node: ast.Call) -> None:
        held = class_held(node)
        path = f"{held}.{node.func.attr}" if held else self.path(node.func)  # type: ignore[attr-defined]
        is_own = isinstance(node.func, ast.Name) and node.func.id in self.own
        if path is not None and is_private(path) and not is_own:
            self.calls.append((path, node, bool(held)))
        if isinstance(node.func, ast.Name) and node.func.id in ("replaced", "wrap", "wrapped"):
            owner = self.path(node.args[0])
            paths = (f"{owner}.{k.arg}" for k in node.keywords if owner and k.arg)
            self.replaced |= set(filter(is_private, paths))
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Of one that is wrapped around a method, the first parameter is that method."""
        paths, wraps = self.paths, self.wraps
        if node.name in wraps:
            self.paths = {**paths, node.args.args[0].arg: wraps[node.name]}
        self.wraps = {**wraps, **self._wraps(node)}
        self.generic_visit(node)
        self.paths, self.wraps = paths, wraps

    def visit_Assign(self, node: ast.Assign) -> None:
        path = self.path(node.targets[0])
        if isinstance(node.targets[0], ast.Attribute) and path is not None and is_private(path):
            self.replaced.add(path)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        bases = [path for path in map(self.path, node.bases) if path and is_private(path)]
        methods = [n.name for n in node.body if isinstance(n, ast.FunctionDef)]
        self.replaced |= {f"{b}.{m}" for b in bases for m in methods if m not in PLAIN}
        if bases:
            self.paths.setdefault(node.name, bases[0])
        self.generic_visit(node)


#: what the package reads of torch's classes without naming them is in shims
SHIM_MODULES = {
    ".".join(f.relative_to(PACKAGE / "_torch").with_suffix("").parts)
    for f in (PACKAGE / "_torch").rglob("*.py")
}


def _shims() -> Iterator[tuple[str, ast.AST]]:
    for file in sorted(PACKAGE.rglob("*.py")):
        name = str(file.relative_to(PACKAGE).with_suffix("")).replace("/", ".")
        yield name.removeprefix("_torch."), ast.parse(file.read_text())


def uses() -> dict[str, Uses]:
    """By module; what one has from a shim is what the shim has from torch."""
    trees = dict(_shims())
    found: dict[str, Uses] = {}
    for _ in range(2):
        for name, tree in trees.items():
            known, own = {}, set()
            for node in ast.walk(tree):
                shim = getattr(node, "module", None) or ""
                if not isinstance(node, ast.ImportFrom) or not shim.startswith(SHIMS):
                    continue
                uses_of_shim = found.get(shim.removeprefix(SHIMS))
                for alias in node.names if uses_of_shim is not None else ():
                    local = alias.asname or alias.name
                    own |= {local} if alias.name in uses_of_shim.own else set()
                    if alias.name in uses_of_shim.paths:
                        known[local] = uses_of_shim.paths[alias.name]
            found[name] = Uses(tree, known, own)
    return found


def _parameters(found: Any) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):
        return None


def _found(path: str) -> Any:
    from torch_scan_hop._torch.forms import resolve

    try:
        return resolve(path)
    except (ImportError, AttributeError):
        return None


def _site(call: ast.Call, parameters: list[inspect.Parameter], is_method: bool) -> str:
    """The object of a method is the first of them. Arguments that go into ``*args`` have no name."""
    in_order = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    positional = [a for a in call.args if not isinstance(a, ast.Starred)]
    keywords = sorted(f"{k.arg}=" for k in call.keywords if k.arg is not None)
    open_ended = len(positional) < len(call.args) or any(k.arg is None for k in call.keywords)
    n_given = len(positional) + (is_method and in_order[:1] == ["self"])
    given = [in_order[k] if k < len(in_order) else "_" for k in range(n_given)]
    return " ".join([*given, *keywords, *(["..."] if open_ended else [])]) or "()"


def _shape(site: str) -> list[str]:
    """What the source says of a call, whatever torch calls its parameters."""
    words = site.removeprefix("? ").split()
    return [w if w == "..." or w.endswith("=") else "" for w in words]


def _joined(site: str, found: Any, known: str) -> str:
    """With what its arguments are called in other versions; "? " if it is made in some only."""
    alike = [s for s in known.split("; ") if s and _shape(s) == _shape(site)]
    some_only = any(s.startswith("? ") for s in alike)
    words = [{word} for word in site.split()]
    for other in alike:
        pairs = zip(words, other.removeprefix("? ").split(), strict=True)
        words = [mine | set(its.split("|")) for mine, its in pairs]
    text = " ".join("|".join(sorted(names)) for names in words)
    return f"? {text}" if some_only or why_not_of_form(found, text, "") else text


def forms(called: dict[str, str], replaced: dict[str, str]) -> tuple[dict[str, str], ...]:
    """``called`` and ``replaced``, of other versions, joined with what this torch says."""
    calls: dict[str, set[str]] = {}
    replaces: dict[str, str] = {}
    for name, use in uses().items():
        use.calls = [c for c in use.calls if not c[2] or name in SHIM_MODULES]
        for path in (*use.replaced, *BY_HAND.get(name, ())):
            given = _parameters(_found(path))
            known = set(filter(None, replaced.get(path, "").split("; ")))
            if given is not None and not isinstance(_found(path), type):
                known.add(" ".join(p.name for p in given))
            if known:
                replaces[path] = "; ".join(sorted(known))
        for path, call, is_method in use.calls:
            found, known_calls = _found(path), called.get(path, "")
            given = _parameters(found)
            if given is not None:
                site = _joined(_site(call, given, is_method), found, known_calls)
                calls.setdefault(path, set()).add(site)
            elif known_calls:
                calls.setdefault(path, set()).update(known_calls.split("; "))
    joined = {path: "; ".join(sorted(sites)) for path, sites in calls.items()}
    return dict(sorted(joined.items())), dict(sorted(replaces.items()))
