"""One function per figure: plain numbers in, PNG bytes out.

matplotlib is imported when a figure is drawn, with the Agg canvas and without pyplot, so that no
display is needed and no global state is left behind.
"""

from __future__ import annotations

import io
from contextlib import contextmanager


@contextmanager
def _axes(png: io.BytesIO, width: float = 6.4, height: float = 3.4):
    """A single set of axes, written to `png` as it is left."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    yield axes
    FigureCanvasAgg(figure).print_png(png)


def bars(values: dict[str, float], *, title: str, unit: str) -> bytes:
    """One bar per entry, with its value written on it; the axis starts at zero."""
    png = io.BytesIO()
    with _axes(png) as axes:
        drawn = axes.bar(list(values), list(values.values()), color="#4c72b0", width=0.6)
        axes.bar_label(drawn, [readable(value) for value in values.values()], padding=2)
        axes.yaxis.set_major_formatter(lambda value, _: readable(value))
        axes.set(title=title, ylabel=unit)
        axes.margins(y=0.15)
    return png.getvalue()


def readable(value: float) -> str:
    """Four digits, never in powers of ten: 23,040, 263.7, 0.0412."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    text = f"{value:.4g}"
    return text if "e" not in text else f"{value:.6f}"


def per_layer(series: dict[str, list[float]], *, title: str, unit: str) -> bytes:
    """One line per entry over the layers; logarithmic when everything is positive."""
    png = io.BytesIO()
    with _axes(png) as axes:
        for number, (name, values) in enumerate(series.items()):
            style = ("-", "--")[number % 2]  # one that covers another lets it be seen
            axes.plot(range(len(values)), values, style, marker="o", markersize=3, label=name)
        everything = [value for values in series.values() for value in values]
        if min(everything) > 0:
            axes.set_yscale("log")
            if max(everything) < 10 * min(everything):  # powers of ten would label next to nothing
                for locate in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                    locate(lambda value, _: readable(value))
        axes.set(title=title, xlabel="layer", ylabel=unit)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))  # beside the lines
    return png.getvalue()


def by_context(
    series: dict[str, list[tuple[int, float]]], *, title: str, unit: str, logarithmic: bool = False
) -> bytes:
    """One line per entry of (tokens, value) points; contexts double from tick to tick."""
    png = io.BytesIO()
    with _axes(png, width=7.4) as axes:
        for number, (name, points) in enumerate(series.items()):
            style = ("-", "--")[number % 2]  # one that covers another lets it be seen
            axes.plot(*zip(*sorted(points), strict=True), style, marker="o", markersize=3, label=name)
        contexts = sorted({context for points in series.values() for context, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, [f"{context:,}" for context in contexts], minor=False)
        axes.set_yscale("log" if logarithmic else "linear")
        axes.set_ylim(bottom=None if logarithmic else 0)
        axes.yaxis.set_major_formatter(lambda value, _: readable(value))
        axes.set(title=title, xlabel="context, tokens", ylabel=unit)
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return png.getvalue()


def needle(cells: list[dict], *, title: str, side: str) -> bytes:
    """Share of needles found, by haystack length and depth; cells as in metrics["needle"]."""
    lengths = sorted({cell["length"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells})
    found = {(cell["depth"], cell["length"]): cell[side] for cell in cells}
    grid = [[found.get((d, n), float("nan")) for n in lengths] for d in depths]
    png = io.BytesIO()
    with _axes(png) as axes:
        image = axes.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axes.set(title=title, xlabel="haystack, tokens", ylabel="depth of the needle")
        axes.set_xticks(range(len(lengths)), lengths)
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axes.figure.colorbar(image, ax=axes, format="{x:.0%}")
    return png.getvalue()


def pareto(
    series: dict[str, list[tuple[float, float]]], *, title: str, unit: str, logarithmic: bool, width: float = 8.4
) -> bytes:
    """One line per family of formats: true bits across, what is lost upwards."""
    png = io.BytesIO()
    with _axes(png, width=width, height=5.0) as axes:
        for number, (name, points) in enumerate(series.items()):
            style = dict(marker="osD^vP*X"[number // 10 % 8], color=f"C{number % 10}", markersize=5, linewidth=1)
            axes.plot([x for x, _ in points], [y for _, y in points], label=name, **style)
        if logarithmic:
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.set(title=title, xlabel="true bits per element, everything stored", ylabel=unit)
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, ncols=1 + len(series) // 24)
    return png.getvalue()
