"""Figures: title, choices, legend, a place for the drawing, caption. The drawing is done by report/assets/*.js."""

from __future__ import annotations

import dataclasses

from qkeel.report.html.markup import Markup, tag


@dataclasses.dataclass(frozen=True, slots=True)
class Chart:
    """One figure. `name` is what the script draws it by; `label` is read to those who cannot see it."""

    name: str
    title: str
    caption: str
    label: str

    def figure(self, note: str = "") -> Markup:
        """Returns the figure, empty until the script fills it; `note` follows the caption."""
        button = {"type": "button", "class": "save", "data-save": self.name, "hidden": None}
        title = tag("h3", {"id": f"{self.name}-title"}, self.title)
        frame = {"class": "chart", "id": f"chart-{self.name}", "data-chart": self.name, "data-label": self.label}
        return tag(
            "figure",
            {"class": "figure", "id": self.name, "aria-labelledby": f"{self.name}-title"},
            tag("div", {"class": "figure-head"}, title, tag("button", button, "Download SVG")),
            choices(self.name),
            tag("div", {"class": "legend", "data-legend": self.name}),
            tag("div", frame),
            tag("figcaption", {}, self.caption + note),
        )


def choices(name: str) -> Markup:
    """Returns the place of the choices of that name."""
    return tag("div", {"class": "controls", "data-controls": name})
