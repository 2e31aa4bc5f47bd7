"""Draws all pictures of the site."""

from __future__ import annotations

from pathlib import Path

from docs.draw import memory, recipes, semantics

PICTURES = Path(__file__).parents[1] / "pictures"


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for drawings in (semantics.drawings(), memory.drawings(), recipes.drawings()):
        for name, drawing in drawings.items():
            (PICTURES / f"{name}.svg").write_text(drawing.svg())


if __name__ == "__main__":
    main()
