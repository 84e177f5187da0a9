# SPDX-License-Identifier: Apache-2.0
"""One HTML page that stands by itself: tables, charts and notes in sections, for the screen and for paper.

In: a title and sections of plain values. Out: a file without a script, a link or anything fetched from elsewhere; all
text from outside is escaped. Costs milliseconds.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; color: #1f2933; background: #fff;
  margin: 0 auto; padding: 24px 28px 48px; max-width: 1120px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 32px 0 8px; padding-bottom: 4px; border-bottom: 1px solid #cbd2d9; }
h3 { font-size: 14px; margin: 0 0 2px; font-weight: 600; }
p { margin: 6px 0; max-width: 80ch; }
.lead { color: #52606d; }
.good { color: #1b6b3a; } .bad { color: #b42318; }
.verdict { font-size: 18px; font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 8px 0 14px; font-size: 13.5px; }
caption { text-align: left; color: #52606d; padding-bottom: 4px; }
th, td { padding: 4px 12px 4px 0; text-align: right; white-space: nowrap; vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
td.text { text-align: left; white-space: normal; overflow-wrap: break-word; }
thead th { border-bottom: 1px solid #7b8794; }
tbody tr + tr td { border-top: 1px solid #e4e7eb; }
td { font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); gap: 20px 28px; }
figure { margin: 0; break-inside: avoid; } figure.wide { grid-column: 1 / -1; }
svg { width: 100%; height: auto; display: block; } svg text { font-size: 11px; fill: #3e4c59;
  paint-order: stroke; stroke: #fff; stroke-width: 3px; }
figure.wide svg { max-width: 800px; }
.legend { list-style: none; margin: 4px 0 0; padding: 0; font-size: 12.5px; }
.legend li { display: inline-block; margin-right: 16px; }
.swatch { display: inline-block; width: 11px; height: 11px; margin-right: 5px; border-radius: 2px; }
pre { background: #f5f7fa; padding: 10px 12px; font-size: 13px; white-space: pre-wrap; overflow-wrap: anywhere; }
ul.notes { padding-left: 20px; max-width: 90ch; } ul.notes li { margin: 2px 0; }
footer { margin-top: 36px; color: #52606d; font-size: 12.5px; }
@media print {
  @page { margin: 14mm; }
  body { padding: 0; max-width: none; font-size: 10.5pt; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  h2 { break-after: avoid; } table, tr { break-inside: avoid; } .scroll { overflow: visible; }
  .charts { grid-template-columns: 1fr 1fr; gap: 12px 18px; } table { font-size: 8.5pt; }
  th, td { padding-right: 8px; }
}
"""


@dataclass(frozen=True)
class Table:
    """Cells are text as a reader sees it; the first column is to the left, the others to the right."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    words: bool = False
    """Whether all columns hold words, which are set to the left and may break."""


@dataclass(frozen=True)
class Chart:
    """An <svg> element from report.svg."""

    title: str
    svg: str
    wide: bool = False


@dataclass
class Section:
    """A heading and what stands below it."""

    title: str
    text: Sequence[str] = ()
    """Paragraphs."""
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    notes: Sequence[str] = field(default_factory=list)


def write_page(
    path: Path,
    title: str,
    sections: Sequence[Section],
    *,
    lead: str = "",
    verdict: tuple[bool, str] | None = None,
    settings: Mapping[str, Any] | None = None,
    versions: Mapping[str, Any] | None = None,
    command: Sequence[str] = (),
    files: Sequence[str] = (),
) -> None:
    """Write the page, whole or not at all.

    Args:
        path: The file.
        title: Of the page.
        sections: In their order; one with nothing in it is left out.
        lead: A sentence or two under the title.
        verdict: Whether it is good, and what it says.
        settings: Nested plain values, shown with dotted keys.
        versions: Of what took part.
        command: The words that make the page's figures again.
        files: Names of files with the same figures, beside the page.
    """
    parts = [f"<h1>{escape(title)}</h1>"]
    parts += [f'<p class="lead">{escape(line)}</p>' for line in lead.splitlines()]
    if verdict is not None:
        parts.append(f'<p class="verdict {"good" if verdict[0] else "bad"}">{escape(verdict[1])}</p>')
    parts += [_section(section) for section in sections if section.tables or section.charts or section.text]
    if settings:
        parts.append(_section(Section("Settings", tables=[key_table(settings)])))
    if versions:
        parts.append(_section(Section("Versions", tables=[key_table(versions)])))
    if command:
        parts.append(f"<h2>How to reproduce</h2>\n<pre>{escape(shlex.join(map(str, command)))}</pre>")
    beside = f"The same figures: {', '.join(map(escape, files))}, beside this page. " if files else ""
    parts.append(f"<footer>{beside}Written by megatron-kd.</footer>")
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_text(
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n" + "\n".join(parts) + "\n</body>\n</html>\n",
        encoding="utf-8",
    )
    os.replace(scratch, path)


def key_table(values: Mapping[str, Any]) -> Table:
    """Nested plain values as two columns: dotted keys and what they hold."""
    return Table(["key", "value"], [[key, _shown(value)] for key, value in flat(values)], words=True)


def flat(values: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    """Pairs of dotted key and value of a nested mapping."""
    pairs = []
    for key, value in values.items():
        name = f"{above}{key}"
        pairs += flat(value, f"{name}.") if isinstance(value, Mapping) and value else [(name, value)]
    return pairs


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    if isinstance(value, float) and abs(value) >= 1e6:
        return f"{value:.4g}"
    return "not set" if value is None else str(value)


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>"]
    parts += [f"<p>{escape(text)}</p>" for text in section.text]
    if section.charts:
        figures = (
            f'<figure class="{"wide" if chart.wide else "half"}"><h3>{escape(chart.title)}</h3>{chart.svg}</figure>'
            for chart in section.charts
            if chart.svg
        )
        parts.append(f'<div class="charts">{"".join(figures)}</div>')
    parts += [_table(table) for table in section.tables if table.rows]
    if section.notes:
        parts.append(f'<ul class="notes">{"".join(f"<li>{escape(note)}</li>" for note in section.notes)}</ul>')
    return "\n".join(parts)


def _table(table: Table) -> str:
    mark, left = (' class="text"', ' style="text-align:left"') if table.words else ("", "")
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    head = "".join(f"<th{left}>{escape(name)}</th>" for name in table.head)
    rows = "".join(f"<tr>{''.join(f'<td{mark}>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    return f'<div class="scroll"><table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
