"""The pages of ``docs/``: their code runs, their links lead somewhere, and nothing is left out."""

from __future__ import annotations

import importlib
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

import torch_scan_hop

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: made of the checkout when the site is built
GENERATED = {"internals.md"} | {
    f"cookbook/{p.stem}.md" for p in (ROOT / "examples" / "cookbook").glob("*.py")
}


def code_of(page: Path) -> list[str]:
    return CODE.findall(page.read_text())


def named(pages: list[Path]) -> list[object]:
    return [pytest.param(page, id=str(page.relative_to(DOCS))) for page in pages]


@pytest.mark.parametrize("page", named([p for p in PAGES if code_of(p)]))
def test_the_code_of_a_page_runs_from_its_top_to_its_end(page):
    namespace: dict[str, object] = {}
    for k, block in enumerate(code_of(page)):
        exec(compile(block, f"{page.name}, block {k}", "exec"), namespace)
    torch.set_grad_enabled(True)


def test_pages_with_code_are_found():
    assert sum(len(code_of(page)) for page in PAGES) >= 12


@pytest.mark.parametrize("page", named(PAGES))
def test_links_within_the_site_lead_to_pages(page):
    links = re.findall(r"\]\((?!http)([^)#]+)", page.read_text())
    for link in links:
        target = (page.parent / link).resolve().relative_to(DOCS)
        assert (DOCS / target).exists() or str(target) in GENERATED, link


def test_every_page_is_in_the_contents():
    contents = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        assert f": {page.relative_to(DOCS)}\n" in contents


REFERENCE = re.findall(r"^::: ([\w.]+)", (DOCS / "reference.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", REFERENCE)
def test_what_the_reference_names_exists_and_says_something(name):
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute, None)
    found = importlib.import_module(name) if found is None else found
    assert len(found.__doc__) > 20


def test_all_that_is_public_is_in_the_reference():
    mentioned = {name.rpartition(".")[2] for name in REFERENCE}
    assert set(torch_scan_hop.__all__) <= mentioned


# --- pictures ---

PICTURES = sorted((DOCS / "pictures").glob("*.svg"))
NUMBER = re.compile(r"-?\d+\.?\d*")


@pytest.mark.parametrize("picture", PICTURES, ids=lambda p: p.stem)
def test_a_picture_is_small_and_shown_and_says_what_it_shows(picture):
    assert picture.stat().st_size < 40_000
    title = ET.parse(picture).find("{http://www.w3.org/2000/svg}title")
    assert title is not None and len(title.text) > 20
    shown = any(f"](../pictures/{picture.name})" in page.read_text() for page in PAGES)
    assert shown or f"cookbook/{picture.stem}.md" in GENERATED  # by docs/hooks.py


def test_pictures_are_what_their_script_draws(monkeypatch):
    """But for digits that torch's versions may differ in."""
    monkeypatch.syspath_prepend(str(ROOT))
    scripts = [
        importlib.import_module(f"docs.draw.{m}") for m in ("semantics", "memory", "recipes")
    ]
    drawn = {name: d.svg() for script in scripts for name, d in script.drawings().items()}
    assert drawn.keys() == {p.stem for p in PICTURES}
    for picture in PICTURES:
        text, expected = drawn[picture.stem], picture.read_text()
        assert NUMBER.sub("#", text) == NUMBER.sub("#", expected), "run python -m docs.draw"
        pairs = zip(NUMBER.findall(text), NUMBER.findall(expected), strict=True)
        assert all(abs(float(a) - float(b)) < 0.5 for a, b in pairs), picture.stem
