"""Content of HTML pages as blocks (dicts), rendered by templates/blocks.html.j2. Jinja escapes their text."""

import functools
from collections.abc import Iterable, Sequence

import jinja2

COLOURS = (  # light, dark
    ("#2563c9", "#6ea8fe"),
    ("#c2410c", "#fb923c"),
    ("#15803d", "#4ade80"),
    ("#7e22ce", "#c084fc"),
    ("#a16207", "#facc15"),
    ("#be185d", "#f472b6"),
    ("#0e7490", "#22d3ee"),
    ("#4b5563", "#9ca3af"),
)

Block = dict[str, object]


@functools.cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("llava_ds.tracking"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.filters["anchor"] = lambda title: "".join(c if c.isalnum() else "-" for c in title.lower())
    return made


def render(template: str, **values: object) -> str:
    """Fill in a template of llava_ds/tracking/templates."""
    return _environment().get_template(template).render(colours=COLOURS, **values)


def show(blocks: list[Block]) -> str:
    """Render blocks alone, outside a page."""
    return str(_environment().get_template("blocks.html.j2").module.show(blocks))


def note(text: str, style: str = "none") -> Block:
    """Return a paragraph. style: "note", "warn", or "none" for a placeholder."""
    return {"kind": "note", "text": text, "style": style}


def heading(text: str) -> Block:
    """Return a heading within a section."""
    return {"kind": "heading", "text": text}


def pre(text: str) -> Block:
    """Return preformatted text that keeps its line breaks."""
    return {"kind": "pre", "text": text}


def details(summary: str, *blocks: Block) -> Block:
    """Return blocks that unfold when the summary is clicked."""
    return {"kind": "details", "summary": summary, "blocks": blocks}


def tiles(numbers: Iterable[tuple[str, str]]) -> Block:
    """Return a row of large numbers with labels. numbers: (number, label) pairs."""
    return {"kind": "tiles", "numbers": list(numbers)}


def charts(figures: Iterable[str]) -> Block:
    """Return figures from chart.py, side by side."""
    return {"kind": "charts", "charts": [figure for figure in figures if figure]}


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    numbers: Sequence[int] = (),
    stacks: bool = False,
    named: bool = False,
) -> Block:
    """Return a table. Cells are text, or results of styled().

    numbers: indices of right-aligned columns; stacks: True to stack a row's cells on a narrow screen; named: True to
    label stacked cells with the column's name.
    """
    rows = list(map(list, rows))
    return {"kind": "table", "head": head, "rows": rows, "numbers": numbers, "stacks": stacks, "named": named}


def styled(text: object, style: str) -> dict[str, str]:
    """Return a cell or an answer with a style: "code", "given", "same"."""
    return {"text": str(text), "style": style}
