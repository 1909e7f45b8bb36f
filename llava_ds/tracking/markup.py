"""The look of the pages, and their common pieces. Every text that comes from elsewhere is escaped here."""

import html
from collections.abc import Iterable, Sequence

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

STYLE = """
:root { color-scheme: light dark; --fg: #1c2430; --dim: #5c6675; --bg: #fff; --card: #f6f8fa; --line: #dde2e8;
  --mark: #d7f0dc; --warn: #fdf0d5 }
@media screen and (prefers-color-scheme: dark) { :root { --fg: #e3e8ee; --dim: #9aa5b3; --bg: #14181d; --card: #1d232a;
  --line: #343c46; --mark: #1f4a2b; --warn: #4a3a17 } }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; margin: 0; color: var(--fg);
  background: var(--bg) }
main { max-width: 1320px; margin: 0 auto; padding: 1.2rem 1rem 4rem }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .4rem 0; overflow-wrap: anywhere }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .8rem; padding-top: .9rem; border-top: 1px solid var(--line) }
h3 { font-size: 1rem; margin: 1.4rem 0 .5rem }
p, h3, summary { overflow-wrap: anywhere } p { margin: .4rem 0; max-width: 75ch } .lead { font-size: 1.02rem }
.note, .none { color: var(--dim) } .none { font-style: italic }
.warn { background: var(--warn); padding: .5rem .8rem; border-radius: 6px }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin-top: .8rem; font-size: .92rem }
a { color: inherit; text-decoration-color: var(--dim); text-underline-offset: 3px }
.state { display: inline-block; font-size: .82rem; padding: .1rem .6rem; border-radius: 1rem; background: var(--warn) }
.state.done { background: var(--mark) }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: .6rem; margin: 1rem 0 }
.tile { background: var(--card); border-radius: 8px; padding: .6rem .8rem }
.tile b { display: block; font-size: 1.25rem; font-weight: 600; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere }
.tile span { color: var(--dim); font-size: .82rem }
.result { display: grid; grid-template-columns: minmax(0, 22rem) minmax(0, 1fr); gap: 1rem 2.5rem; margin: 1rem 0;
  background: var(--card); border-radius: 8px; padding: 1rem 1.2rem; border-left: 5px solid var(--s0) }
.result.none { grid-template-columns: minmax(0, 1fr); border-left-color: var(--line) }
.figures { display: flex; flex-wrap: wrap; gap: .8rem 1.6rem; align-content: start }
.figure b { display: block; font-size: 1.7rem; line-height: 1.1; font-weight: 600; color: var(--dim);
  font-variant-numeric: tabular-nums }
.figure.main { flex: 1 0 100% } .figure.main b { font-size: 3.2rem; color: var(--fg) }
.figure span, .figure small { display: block; overflow-wrap: anywhere } .figure small { color: var(--dim) }
.kinds { display: grid; grid-template-columns: fit-content(9rem) minmax(4rem, 1fr) max-content; gap: .3rem .8rem;
  align-items: center; font-size: .92rem; font-variant-numeric: tabular-nums }
.kind { overflow-wrap: anywhere } .values { display: flex; gap: .6rem } .blind { color: var(--dim) }
.track { position: relative; height: .85rem; background: var(--line); border-radius: 3px }
.track i { position: absolute; inset: 0 auto 0 0; background: var(--s0); border-radius: 3px }
.track u { position: absolute; top: -3px; bottom: -3px; width: 4px; margin-left: -2px; background: currentcolor;
  outline: 1px solid var(--card) }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); gap: 1rem }
figure { margin: 0; background: var(--card); border-radius: 8px; padding: .7rem .6rem .3rem; min-width: 0 }
figcaption { font-weight: 600; font-size: .92rem; padding: 0 .3rem .3rem; display: flex; flex-wrap: wrap;
  justify-content: space-between; gap: 0 1rem }
.keys { font-weight: 400; color: var(--dim); font-size: .82rem; display: flex; flex-wrap: wrap; gap: 0 .8rem }
.key::before { content: ""; display: inline-block; width: 1em; height: 3px; vertical-align: middle;
  margin-right: .35em; background: currentcolor }
.key.thin::before { opacity: .4; height: 1px } .key.mark::before { width: 4px; height: .9em }
figcaption small { font-weight: 400; color: var(--dim); border: 1px solid var(--line); border-radius: 3px;
  padding: 0 .3em; white-space: nowrap }
svg { display: block; width: 100%; height: auto } svg text { font-size: 12px; fill: var(--dim) }
.grid { stroke: var(--line); stroke-width: 1; fill: none } .bar { fill: var(--s0) }
.curve { stroke: currentcolor; fill: none; stroke-width: 1.7; stroke-linejoin: round }
.curve circle { fill: currentcolor; stroke: none }
.faint { opacity: .28; stroke-width: 1 }
.scroll { overflow-x: auto; max-width: 100% }
table { border-collapse: collapse; font-size: .9rem; min-width: min(100%, 20rem) }
th, td { text-align: left; vertical-align: top; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; min-width: 4.5rem }
th { font-weight: 600 } th, td:first-child, td.n { white-space: nowrap }
.stack :is(th, td.n), .stack td:first-child { white-space: normal } .stack td:first-child { min-width: 11rem }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
code, pre { font: .86em/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--card); padding: .8rem; border-radius: 8px;
  margin: .5rem 0 }
details { margin: .6rem 0 } summary { cursor: pointer; font-weight: 600; font-size: .95rem }
.given { background: var(--mark); border-radius: 3px; padding: 0 .3em }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 290px), 1fr)); gap: 1rem }
.sample { background: var(--card); border-radius: 8px; padding: .8rem; min-width: 0; overflow-wrap: anywhere }
.sample img { min-width: 112px; max-width: 100%; border-radius: 4px; margin: 0 .4rem .4rem 0; vertical-align: top }
.question { font-weight: 600; white-space: pre-wrap }
.sample dl { display: grid; grid-template-columns: fit-content(40%) 1fr; gap: .1rem .8rem; margin: .5rem 0 0;
  font-size: .92rem }
.sample dt { color: var(--dim); font-variant-numeric: tabular-nums } .sample dd { margin: 0; white-space: pre-wrap }
.sample .same { background: var(--mark); border-radius: 3px; padding: 0 .25em }
mark { background: var(--mark); color: inherit; border-radius: 3px }
.image { background: var(--line); border-radius: 3px; padding: 0 .3em }
.datum { margin: 1.6rem 0; overflow-wrap: anywhere } .datum h3 { margin: 0 }
.shown { display: flex; flex-wrap: wrap; gap: .8rem; align-items: flex-start; margin-top: .4rem }
.shown pre { flex: 1 1 20rem; min-width: 0; margin: 0 }
.pictures { display: flex; flex-wrap: wrap; gap: .5rem; max-width: 100% }
.pictures img { max-width: 100%; min-width: 112px; border-radius: 4px }
footer { margin-top: 3rem; color: var(--dim); font-size: .85rem }
@media (max-width: 800px) { .result { grid-template-columns: minmax(0, 1fr) } }
@media (max-width: 600px) { th, td:first-child { white-space: normal; overflow-wrap: break-word }
  .stack thead { display: none }
  table:not(.stack) :is(th, td):first-child { position: sticky; left: 0; background: var(--bg); max-width: 9rem }
  .stack :is(td, td.n) { display: block; border: 0; padding: 0; min-width: 0; white-space: normal; text-align: left }
  .stack td:first-child { font-weight: 600; overflow-wrap: anywhere }
  .stack td[data-of]::before { content: attr(data-of) ": "; color: var(--dim) }
  .stack tr { display: block; padding: .4rem 0; border-bottom: 1px solid var(--line) } }
@media print { nav { display: none } details:not([open]) > :not(dl) { display: revert }
  details::details-content { content-visibility: visible; block-size: auto }
  figure, .sample, .result, tr { break-inside: avoid } h2, h3 { break-after: avoid }
  .track, .track *, .key::before, .tile, .result, .same, .given, mark { print-color-adjust: exact } }
"""


def document(title: str, body: Iterable[str]) -> str:
    """A whole page, which asks nothing of any server: not even for an icon."""
    colours = "".join(f"--s{i}: {light};" for i, (light, _) in enumerate(COLOURS))
    dark = "".join(f"--s{i}: {colour};" for i, (_, colour) in enumerate(COLOURS))
    classes = "".join(f".s{i} {{ color: var(--s{i}) }}" for i in range(len(COLOURS)))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">"
        f'<link rel="icon" href="data:,"><title>{esc(title)}</title>'
        f"<style>:root {{ {colours} }} @media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }} "
        f"{classes}{STYLE}"
        f"</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def esc(value: object) -> str:
    """As text of a page or value of an attribute in quotes."""
    return html.escape(str(value))


def section(title: str, *parts: str) -> str:
    """A part of the page, to be found by its title."""
    return f'<section id="{anchor(title)}"><h2>{esc(title)}</h2>{"".join(parts)}</section>'


def anchor(title: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in title.lower())


def navigation(titles: Iterable[str]) -> str:
    links = "".join(f'<a href="#{anchor(title)}">{esc(title)}</a>' for title in titles)
    return f"<nav>{links}</nav>"


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    numbers: Sequence[int] = (),
    stacks: bool = False,
    named: bool = False,
) -> str:
    """Escaped cells; numbers: columns that stand to the right; stacks: whether the cells of a row may stand below each
    other where a screen is narrow; named: whether they then say whose column they are of. A cell that is a Markup is
    taken as it is."""

    def cell(tag: str, column: int, value: object) -> str:
        kind = ' class="n"' if column in numbers else ""
        kind += f' data-of="{esc(head[column])}"' if named and tag == "td" and column else ""
        return f"<{tag}{kind}>{value if isinstance(value, Markup) else esc(value)}</{tag}>"

    header = "".join(cell("th", i, name) for i, name in enumerate(head))
    lines = "".join("<tr>" + "".join(cell("td", i, value) for i, value in enumerate(row)) + "</tr>" for row in rows)
    kind = ' class="stack"' if stacks else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{header}</tr></thead><tbody>{lines}</tbody></table></div>'


class Markup(str):
    """Text that is HTML already."""


def tiles(numbers: Iterable[tuple[str, str]]) -> str:
    """Large numbers with what they are of below: (number, label)."""
    each = (f'<div class="tile"><b>{esc(number)}</b><span>{esc(label)}</span></div>' for number, label in numbers)
    return f'<div class="tiles">{"".join(each)}</div>'


def details(summary: str, body: str) -> str:
    return f"<details><summary>{esc(summary)}</summary>{body}</details>"


def sentence(text: str, kind: str = "none") -> str:
    return f'<p class="{kind}">{esc(text)}</p>'
