"""The page: text, charts and tables in one file that works without a network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import growprune
from growprune.errors import GrowpruneError, need
from growprune.files.disk import finite, replacing
from growprune.report import words
from growprune.report.charts import (
    Chart,
    Style,
    Styles,
    Value,
    charts_over_time,
    frontier_charts,
    layer_chart,
    quantities,
    short,
)
from growprune.report.groups import Group, group_runs, is_control, order
from growprune.runs import Record
from growprune.runs.comparison import COST, QUALITY
from growprune.runs.record import in_full
from growprune.runs.table import HEAD, cells_of, errors_of, notes_of, tunings_of

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""Makes the browser block all network requests."""


def write_page(records: Sequence[Record], out: Path) -> None:
    if not out.parent.is_dir():
        raise GrowpruneError(f"cannot write {out}: folder {out.parent} does not exist. Make it, or choose another -o")
    if out.is_dir():
        raise GrowpruneError(f"-o must be a file, such as {out / 'page.html'}, but {out} is a folder")
    plotly = need("plotly.offline", "report", "report needs plotly").get_plotlyjs()
    content = render(records, plotly).encode()
    with replacing(out) as file:
        file.write(content)


def render(records: Sequence[Record], plotly: str) -> str:
    """The whole page as a string, including the code of Plotly."""
    records = sorted(records, key=order)
    groups = group_runs(records)
    styles = Styles(row for group in groups for row in group.rows)
    charts: list[Chart] = []
    body = [_head(groups, records)]
    body += [_group(number, group, styles, charts) for number, group in enumerate(groups, 1)]
    body.append(_tuning(records))
    body.append(f"<section id='runs'><h2>All runs</h2>{_all_runs(records)}</section>")
    body.append(_again(records))
    specs = [
        {"name": f"{number:02d}-{chart.name}", "data": chart.data, "layout": chart.layout}
        for number, chart in enumerate(charts, 1)
    ]
    return _asset("page.html").format(
        policy=POLICY,
        title=escape(words.title(groups, records)),
        style=_asset("page.css"),
        body="\n".join(body),
        charts=json.dumps(finite(specs)).replace("<", "\\u003c"),
        plotly=plotly.replace("</script", "<\\/script"),
        script=_asset("page.js"),
    )


def _head(groups: Sequence[Group], records: Sequence[Record]) -> str:
    made = f"Written on {date.today().isoformat()} by growprune {growprune.__version__}."
    if versions := words.versions(records):
        made += f" The runs were made with {versions}."
    said = "".join(f"<p class='note'>{escape(note)}</p>" for note in words.notes(records))
    for group in groups:
        said += f"<p>{' '.join(map(escape, words.summary(group)))}</p>"
        if command := words.compare_command(group):
            said += f"<p>This command makes these runs:</p><pre class='command' tabindex='0'>{escape(command)}</pre>"
    links = [(f"group-{number}", group.name) for number, group in enumerate(groups, 1)]
    links += [("tuning", "Tuning")] if tunings_of(records) else []
    links += [("runs", "All runs"), ("again", "How to reproduce"), ("words", "Terms")]
    contents = "".join(f"<li><a href='#{place}'>{escape(text)}</a></li>" for place, text in links)
    return (
        "<header><p class='brand'>growprune report"
        "<button type='button' id='theme' aria-live='polite'>Theme: auto</button></p>"
        f"<h1>{escape(words.title(groups, records))}</h1><p class='small'>{escape(made)}</p></header>"
        f"<section id='summary'><h2>Summary</h2>{said}</section><nav aria-label='Contents'><ul>{contents}</ul></nav>"
    )


def _group(number: int, group: Group, styles: Styles, charts: list[Chart]) -> str:
    """The section of a group of comparable runs."""
    shown = [*charts_over_time(group, styles), layer_chart(group, styles)]
    compared = frontier_charts(group, styles) if len(group.rows) > 1 else []
    sections = [f"<section id='group-{number}'><h2>{escape(group.name)}</h2>"]
    if group.finished:
        test = f"{group.metric.name}, test{group.metric.direction}"
        head = [test if name == "test" else name for name in (*QUALITY, *COST)]
        rows = [[*group.table.cells(row).values()] for row in group.finished]
        sections.append(f"<h3>Results</h3>{_table(head, rows)}")
    sections.append(_legend(group, styles) if len(group.rows) > 1 else "")
    sections.append(_figures("Training", [chart for chart in shown if chart is not None], charts))
    sections.append(_figures("Quality and cost", compared, charts))
    found = {chart.title for chart in (*shown, *compared) if chart is not None}
    if lacking := [each.title for each in quantities(group) if each.title not in found]:
        sections.append(f"<p class='small'>Not shown, because no run has the data: {escape(', '.join(lacking))}.</p>")
    return "\n".join([*sections, "</section>"])


def _legend(group: Group, styles: Styles) -> str:
    """The legend of all charts of a group, which shows and hides rows. Controls are hidden at first."""
    rows = {row.name: row for row in reversed(group.rows)}
    chips = {name: styles.of(rows[name]) for name in reversed(rows)}
    sparsities = sorted({row.sparsity for row in group.sparse})
    if len(sparsities) > 1:
        chips |= {in_full(each): Style("currentColor", "", styles.dash(each)) for each in sparsities}
    hidden = [name for name, row in rows.items() if is_control(row)]
    boxes = "".join(
        f"<label><input type='checkbox' value='{escape(name)}'{'' if name in hidden else ' checked'}>{style.swatch}"
        f"<span>{escape(name)}</span></label>"
        for name, style in chips.items()
    )
    note = f" ({len(hidden)} control{'s are' if len(hidden) > 1 else ' is'} hidden at first)" if hidden else ""
    return (
        f"<details class='legend' open><summary>Rows in the charts{note}</summary><div class='chips'>{boxes}"
        "<span><button type='button' data-all='1'>all</button> <button type='button' data-all=''>none</button></span>"
        "</div></details>"
    )


def _tuning(records: Sequence[Record]) -> str:
    """The section about tuned rows: their choice, and the number of runs."""
    if not (tunings := tunings_of(records)):
        return ""
    said = [*notes_of(tunings), *(line for tuning in tunings for line in errors_of(tuning))]
    text = f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in said)}</ul>"
    table = _table(HEAD, [cells_of(tuning) for tuning in tunings])
    return f"<section id='tuning'><h2>Tuning</h2>{text}{table}</section>"


def _figures(heading: str, shown: Sequence[Chart], charts: list[Chart]) -> str:
    """A heading and its charts, which are appended to those of the page."""
    figures = ""
    for number, chart in enumerate(shown, len(charts)):
        about = escape(f"{chart.title}. {chart.caption} The numbers are in the table below.")
        kinds = "".join(
            f"<button type='button' data-chart='{number}' data-kind='{kind}'>{kind.upper()}</button>"
            for kind in ("png", "svg", "csv")
        )
        figures += (
            f"<figure id='chart-{number}'><h4>{escape(chart.title)}</h4>"
            f"<div class='plot' id='plot-{number}' role='img' aria-label='{about}'></div>"
            f"<figcaption>{escape(chart.caption)}</figcaption>"
            f"<details><summary>Table</summary>{_table(chart.columns, chart.rows)}</details>"
            f"<p class='downloads'>Download: {kinds}</p></figure>"
        )
    charts += shown
    return f"<h3>{heading}</h3><div class='charts'>{figures}</div>" if figures else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[Value]]) -> str:
    heads = "".join(f"<th scope='col'>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<div class='scroll' tabindex='0'><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"


def _cell(value: Value) -> str:
    """A table cell. Numbers are shown short, and stored with all digits for the CSV file."""
    if value is None:
        return "<td class='number' data-v=''>-</td>"
    if isinstance(value, str):
        return f"<td{' class=long' if len(value) > 40 else ''}>{escape(value)}</td>"
    exact, shown = repr(value), short(value)
    return f"<td class='number'{f' data-v={exact!r}' if exact != shown else ''}>{shown}</td>"


def _all_runs(records: Sequence[Record]) -> str:
    """The table of all runs, finished or not."""
    head = ["run", "status", "method", "sparsity", "seed", "epochs", "metric", "test", "test of best by validation"]
    rows: list[list[Value]] = []
    for record in records:
        best = record.figure("best") or {}
        why = record.why or ("tuning run, not chosen" if record.is_passed_over else "")
        status = f"{record.status}: {why}" if why else record.status
        rows.append(
            [
                *(record.name, status, record.method, record.sparsity, record.seed, record.epochs, record.metric.name),
                *(record.test, (best.get("test") or {}).get(record.metric.name), record.total("alive")),
                *(record.figure(name) for name in ("file_bytes", "peak_bytes", "seconds")),
            ]
        )
    return _table([*head, "live weights", "file bytes", "peak bytes", "seconds"], rows)


def _again(records: Sequence[Record]) -> str:
    """The section with commands, recipes, machines and versions."""
    recipes = "".join(
        f"<details><summary>Recipe of {escape(record.name)}</summary>"
        f"<pre>{escape(json.dumps(_without_places(record.recipe), indent=1))}</pre></details>"
        for record in records
        if record.recipe
    )
    machines = ""
    if found := words.environments(records):
        names = list(dict.fromkeys(name for environment, _ in found for name in environment))
        rows = [[*(str(environment.get(name, "")) for name in names), ", ".join(who)] for environment, who in found]
        machines = f"<h3>Machines and versions</h3>{_table([*names, 'runs'], rows)}"
    return (
        f"<section id='again'><h2>How to reproduce</h2><p>Replace DATA by the folder with your data.</p>"
        f"<pre tabindex='0'>{escape(words.commands(records))}</pre>{recipes}{machines}</section>"
    )


def _without_places(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe without paths on this machine."""
    if recipe.get("weights"):
        recipe = {**recipe, "weights": Path(str(recipe["weights"])).name}
    task = recipe.get("task")
    if not isinstance(task, dict) or not task.get("data"):
        return recipe
    return {**recipe, "task": {**task, "data": Path(str(task["data"])).name}}


def _asset(name: str) -> str:
    return files("growprune.report").joinpath(name).read_text(encoding="utf-8")
