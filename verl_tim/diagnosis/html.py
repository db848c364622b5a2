"""Pages that need no network: plots, tables and plotly itself are inside one HTML file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

import verl_tim
from verl_tim.diagnosis.figures import BAND_OPACITY, HEAT, PALETTE, Drawing
from verl_tim.diagnosis.formats import percent, short, written


def render(
    template: str, *, data: dict[str, Any], filters: dict[str, Callable[..., Any]] | None = None, **values: Any
) -> str:
    """A page from a template of this package.

    Args:
        data: what the page's script reads, see `figure_data`.
        filters: of this template alone.
    """
    environment = Environment(
        loader=PackageLoader("verl_tim.diagnosis"),
        autoescape=select_autoescape(("html", "j2")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "short": short,
        "percent": percent,
        "written": written,
        "setting": setting,
        "breakable": breakable,
        **(filters or {}),
    }
    return environment.get_template(template).render(
        palette=PALETTE,
        data=_script_json(data),
        has_clock=data["clocks"] is not None,
        plotlyjs=Markup(get_plotlyjs()),
        version=verl_tim.__version__,
        **values,
    )


def figure_data(drawings: Sequence[Drawing], clocks: list[dict[int, float]] | None = None) -> dict[str, Any]:
    """Figures and what the script draws them with.

    Args:
        clocks: per run on the page, step -> seconds; None: there is no time axis.
    """
    return {
        "figures": {drawing.plot.id: json.loads(drawing.figure.to_json()) for drawing in drawings},
        "palette": PALETTE,
        "heat": HEAT,
        "opacity": BAND_OPACITY,
        "clocks": clocks,
    }


def setting(value: Any) -> str:
    """A setting as text."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def breakable(name: str) -> Markup:
    """A dotted or slashed name that may wrap at its separators."""
    return Markup(re.sub(r"([./_])", r"\1<wbr>", str(escape(name))))


def _script_json(data: Any) -> Markup:
    """JSON that may stand inside a script element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))
