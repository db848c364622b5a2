"""A report as one HTML file that needs no network: facts, and sections of a plot and a table each."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup
from plotly.offline import get_plotlyjs

import verl_tim

PLOT_HEIGHT = 320
COLOR = "#3b7ddd"  # readable on light and dark
MARKED = "#d9590b"


@dataclass(frozen=True)
class Section:
    """A titled part of a page.

    Attributes:
        note: a sentence under the title.
        figure: a plot, or None; its colours should suit light and dark backgrounds.
        headings, rows: a table of text cells; no rows, no table. marked: numbers of rows to stand out.
    """

    title: str
    note: str = ""
    figure: go.Figure | None = None
    headings: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    marked: Collection[int] = ()


@dataclass(frozen=True)
class Page:
    """What a page says: title, one sentence, facts by name, sections."""

    title: str
    lead: str
    facts: Mapping[str, str]
    sections: Sequence[Section] = field(default_factory=list)

    def render(self) -> str:
        """The HTML."""
        environment = Environment(
            loader=PackageLoader("verl_tim.verification"),
            autoescape=select_autoescape(("html", "j2")),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        figures = {
            f"plot{at}": json.loads(section.figure.to_json())
            for at, section in enumerate(self.sections)
            if section.figure is not None
        }
        return environment.get_template("report.html.j2").render(
            report=self,
            figures=_script_json(figures),
            plotlyjs=Markup(get_plotlyjs()),
            version=verl_tim.__version__,
        )

    def write(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.render(), encoding="utf-8")
        return path


def plot(traces: Sequence[go.Scatter | go.Bar], *, x: str, y: str, **axes: Any) -> go.Figure:
    """A figure in the page's style; `axes`: further settings of `xaxis` and `yaxis`."""
    layout: dict[str, Any] = {
        "height": PLOT_HEIGHT,
        "margin": {"l": 8, "r": 14, "t": 10, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12},
        "hovermode": "closest",
        "dragmode": False,
        "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0},
        "xaxis": {"title": {"text": x}, "automargin": True, "fixedrange": True, **axes.get("xaxis", {})},
        "yaxis": {"title": {"text": y}, "automargin": True, "fixedrange": True, **axes.get("yaxis", {})},
    }
    figure = go.Figure(list(traces), layout=layout)
    figure.update_layout(template="none")
    return figure


def _script_json(data: Any) -> Markup:
    """JSON that may stand inside a script element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))
