"""Draws a document as one self-contained HTML file."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import jinja2

from slurmspot.errors import UsageError
from slurmspot.report.document import GROUPS, MARKS, Document
from slurmspot.report.drawing import (
    ZOOMS,
    fall_picture,
    loss_picture,
    spread_pictures,
    timeline_picture,
)

_SHORT_TABLE = 40  # longer tables begin closed


def render_html(document: Document) -> str:
    """The page: inline styles and pictures, no script, no request to anywhere.

    Every text of the document is escaped.
    """
    templates = resources.files("slurmspot.report") / "templates"
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.from_string((templates / "report.html").read_text("utf-8"))
    return template.render(
        document=document,
        style=(templates / "report.css").read_text("utf-8"),
        timeline=timeline_picture(document),
        loss=loss_picture(document),
        spreads=spread_pictures(document),
        falls=fall_picture(document),
        zooms=ZOOMS,
        phases=GROUPS,
        marks=MARKS,
        short=_SHORT_TABLE,
    )


def write_html(document: Document, path: Path) -> None:
    """Write the page to ``path``, so that it is either whole or not there.

    Raises:
        UsageError: it cannot be written.
    """
    page = render_html(document)
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(page, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written", why=error.strerror) from None
