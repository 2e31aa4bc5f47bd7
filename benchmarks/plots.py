"""SVG plots; without matplotlib there are tables only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

Series = Mapping[str, list[tuple[float, float]]]


def plot(path: Path, title: str, x: str, y: str, series: Series) -> str:
    """Writes the plot and gives the markdown that shows it; both axes logarithmic."""
    drawn = {name: sorted(points) for name, points in series.items() if points}
    if not drawn:
        return ""
    try:
        import matplotlib
    except ImportError:
        return f"(no plot of {title}: matplotlib is not installed)"
    matplotlib.use("svg")
    # stable output: no dates, no random ids
    matplotlib.rcParams["svg.hashsalt"] = "torch_scan_hop"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name, points in drawn.items():
        axes.loglog(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return f"![{title}]({path.name})"
