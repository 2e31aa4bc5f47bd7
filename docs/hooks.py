"""What mkdocs makes of the checkout: a page for each recipe, and the map of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "examples" / "cookbook"
#: the script that compares; it is no recipe
HELPERS = {"compare"}


def on_files(files: Files, config: Any) -> Files:
    rows = []
    for path in sorted(RECIPES.glob("*.py")):
        if path.stem in HELPERS:
            continue
        summary = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
        title = " ".join(_word(part) for part in path.stem.split("_"))
        rows.append(f"| [{title}]({path.stem}.md) | {' '.join(summary.split())} |")
        picture = _picture(path.stem)
        code = f'```python\n--8<-- "{path.relative_to(ROOT)}"\n```'
        text = f"# {title[0].upper()}{title[1:]}\n\n{summary}\n\n{picture}{code}\n"
        files.append(_page(config, f"cookbook/{path.stem}.md", text))
    files.append(_page(config, "internals.md", _without_links(ROOT / "ARCHITECTURE.md")))
    index = files.get_file_from_path("cookbook/index.md")
    assert index is not None
    config["extra"]["recipes"] = "| recipe | |\n|---|---|\n" + "\n".join(rows)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    return markdown.replace("{{ recipes }}", config["extra"]["recipes"])


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Docstrings are written for readers of source: their roles and double colons go."""
    html = re.sub(r":(class|func|meth|mod):(?=<code>)", "", html)
    return html.replace("::</p>", ":</p>")


def _word(part: str) -> str:
    acronyms = {"ctc", "gae", "hmm", "kv", "lru", "lstm", "maml", "ode", "rnn", "rssm", "ssm"}
    return part.upper() if part in acronyms else part


def _picture(recipe: str) -> str:
    """Its picture, if `docs/draw` makes one; what that says of itself is the alternative text."""
    file = ROOT / "docs" / "pictures" / f"{recipe}.svg"
    if not file.exists():
        return ""
    says = re.search("<title>(.*)</title>", file.read_text())
    assert says is not None
    return f"![{says[1]}](../pictures/{recipe}.svg)\n\n"


def _page(config: Any, path: str, text: str) -> File:
    page = File.generated(config, path, content=text)
    page.inclusion = page.inclusion.__class__.NOT_IN_NAV
    return page


def _without_links(path: Path) -> str:
    """Links between files of the checkout lead nowhere here."""
    return re.sub(r"\[([^\]]+)\]\((?!http)[^)]+\)", r"\1", path.read_text())
