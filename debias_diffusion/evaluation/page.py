"""Tables and figures as Markdown and as one HTML page that needs nothing but itself."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path


@dataclass(frozen=True)
class Table:
    """A table of text; the first column names its rows."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    is_detail: bool = False  # folded away on the page, left out on the terminal
    num_brief: int | None = None  # columns shown on the terminal, where a long last one would bury the rest


@dataclass(frozen=True)
class Section:
    """A heading with what stands below it; `figures` are (path of a PNG beside the report, <svg> element), `sheets` such
    PNGs with <img> elements, folded away below the tables."""

    title: str
    lines: Sequence[str]
    tables: Sequence[Table]
    figures: Sequence[tuple[str, str]] = ()
    sheets: Sequence[tuple[str, str]] = ()


def to_markdown(title: str, sections: Sequence[Section], *, details: bool = True) -> str:
    """The report as Markdown; without `details` the short form for a terminal."""
    blocks = [f"# {title}"] if title else []
    for section in sections:
        blocks += [f"## {section.title}", *section.lines]
        blocks += [f"![{Path(png).stem}]({png})" for png, _ in section.figures if details]
        for table in section.tables:
            if table.is_detail and not details:
                continue
            shown = table if details or table.num_brief is None else _brief(table, table.num_brief)
            blocks += [*([f"### {table.title}"] if table.title else []), _markdown_table(shown)]
            blocks += [table.note] if table.note else []
        blocks += [f"![{Path(png).stem}]({png})" for png, _ in section.sheets if details]
    return printable("\n\n".join(blocks) + "\n")


def to_html(title: str, sections: Sequence[Section]) -> str:
    """The report as one page without a single reference outside itself."""
    body = [f"<h1>{escape(title)}</h1>"]
    for section in sections:
        body.append(f"<section><h2>{escape(section.title)}</h2>")
        body += [f"<p>{escape(line)}</p>" for line in section.lines]
        if section.figures:
            body.append(
                f'<div class="figures">{"".join(f"<figure>{svg}</figure>" for _, svg in section.figures)}</div>'
            )
        body += [_html_table(table) for table in section.tables]
        for png, image in section.sheets:
            title_of = escape(Path(png).stem.replace("-", " ").capitalize())
            body.append(f"<details><summary>{title_of}</summary><figure>{image}</figure></details>")
        body.append("</section>")
    return printable(_PAGE.format(title=escape(title), body="\n".join(body)))


def printable(text: str) -> str:
    """The text with what no file of text can hold written out: bytes of a file's name that are not UTF-8.

    >>> printable("caf\\udce9/encoder")
    'caf\\\\udce9/encoder'
    """
    return text.encode("utf-8", "backslashreplace").decode()


def write_whole(path: Path, text: str) -> Path:
    """Writes a text file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    return partial.replace(path)


def _brief(table: Table, columns: int) -> Table:
    return replace(table, header=table.header[:columns], rows=[row[:columns] for row in table.rows])


def _markdown_table(table: Table) -> str:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (table.header, *table.rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(table.header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    rule = "| " + " | ".join("-" * width for width in widths) + " |"
    return "\n".join([lines[0], rule, *lines[1:]])


def _html_table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.header)
    rows = []
    for first, *rest in table.rows:
        rows.append(
            f'<tr><th scope="row">{escape(first)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in rest) + "</tr>"
        )
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    table_html = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    html = f'<div class="table" tabindex="0">{table_html}</div>{note}'
    if table.is_detail:
        return f"<details><summary>{escape(table.title)}</summary>{html}</details>"
    return (f"<h3>{escape(table.title)}</h3>" if table.title else "") + html


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<style>
:root {{ --ink: #1b1f24; --page: #ffffff; --line: #d0d7de; --soft: #57606a; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6edf3; --page: #14171c; --line: #363d47; --soft: #9aa5b1; }} }}
body {{ color: var(--ink); background: var(--page); font: 16px/1.5 system-ui, sans-serif; margin: 0 auto;
  padding: 1rem; max-width: 76rem; overflow-wrap: anywhere; }}
h1 {{ font-size: 1.5rem; }}
h2 {{ font-size: 1.25rem; margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1rem; }}
h3, summary {{ font-size: 1rem; font-weight: 600; margin: 1.5rem 0 .5rem; }} summary {{ cursor: pointer; }}
.note {{ color: var(--soft); font-size: .875rem; }}
.table {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }}
th, td {{ padding: .35rem .75rem .35rem 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }}
tbody th {{ position: sticky; left: 0; background: var(--page); max-width: 11rem; overflow-wrap: anywhere; }}
.figures {{ display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); }}
figure {{ margin: 0; }} figure svg {{ display: block; width: 100%; height: auto; max-width: 44rem; }}
figure img {{ display: block; max-width: 100%; height: auto; }}
@media print {{ .table {{ overflow: visible; }} }}
</style></head><body>
{body}
</body></html>
"""
