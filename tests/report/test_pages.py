# SPDX-License-Identifier: Apache-2.0
"""Pages as a browser would read them: what stands in them, that nothing is fetched, and that text stays text."""

import csv
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_kd.cli import main
from megatron_kd.report.page import Section, Table, write_page
from megatron_kd.report.pages import FREQUENCY, compare_page, plan_page
from megatron_kd.report.plan import make_plan
from megatron_kd.report.plan_published import GPT_OSS_20B
from megatron_kd.report.plan_shape import MACHINES, Layout, Run, Training
from megatron_kd.report.svg import line_chart, stacked_bars

EVIL = '<script>alert("x")</script>&amp;'


class Reader(HTMLParser):
    """Collects tags, headings, the cells of each table, and the page's text; insists that tags close in order."""

    VOID = {"meta", "br"}

    def __init__(self, text: str):
        super().__init__()
        self.open, self.tags, self.attributes = [], set(), []
        self.headings, self.tables, self.text = [], [], ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attributes]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag in ("h1", "h2"):
            self.headings.append("")

    def handle_startendtag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attributes]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data
        elif self.open and self.open[-1] in ("h1", "h2"):
            self.headings[-1] += data


def read(path: Path) -> Reader:
    """The page, which must not be able to fetch anything."""
    text = path.read_text()
    page = Reader(text)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "a"}
    assert not [one for one in page.attributes if one[1] in ("src", "href", "onload")]
    assert set(re.findall(r"https?://[^\"' ]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert "url(" not in text and "@import" not in text
    return page


def test_text_from_outside_stays_text(tmp_path):
    write_page(
        tmp_path / "page.html",
        EVIL,
        [Section(EVIL, text=[EVIL], tables=[Table([EVIL], [[EVIL]], EVIL)], notes=[EVIL])],
        lead=EVIL,
        verdict=(False, EVIL),
        settings={EVIL: {EVIL: [EVIL]}},
        command=["megatron-kd", EVIL],
        files=[EVIL],
    )
    page = read(tmp_path / "page.html")
    assert page.headings[:2] == [EVIL, EVIL] and [EVIL] in page.tables[0]
    assert page.tables[1][1] == [f"{EVIL}.{EVIL}", EVIL] and page.text.count(EVIL) >= 12
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def path_points(svg: str) -> list[list[tuple[float, float]]]:
    """Each run of connected points of each path."""
    runs = [part for path in re.findall(r' d="([^"]+)"', svg) for part in path.replace("h0", "").split("M")[1:]]
    return [[tuple(map(float, point.split())) for point in run.split("L")] for run in runs]


def test_lines_are_where_their_numbers_say():
    svg = line_chart("t", {"up": [(0, 1.0), (10, 3.0)], "none": [], "down": [(0, 2.0), (5, math.nan), (10, 1.0)]})
    up, before, after = path_points(svg)
    assert up[0][0] == before[0][0] < after[0][0] == up[1][0]
    assert up[0][1] == after[0][1] > before[0][1] > up[1][1]  # y grows downwards
    assert before[0][1] == pytest.approx((up[0][1] + up[1][1]) / 2, abs=0.1)
    assert ">none<" not in svg and svg.count('class="swatch"') == 2
    assert line_chart("t", {"none": [], "nan": [(1, math.nan)]}) == ""
    assert all(len(line_chart("t", {"flat": [(0, value), (1, value)]})) > 100 for value in (0, -3.0, 1e-9, 4e12))


def test_bars_are_as_long_as_their_numbers():
    svg = stacked_bars("t", {"a": {"x": 2, "y": 6}, "b": {"x": 4, "y": 0}}, labels={"a": EVIL, "b": "4"}, limit=5)
    left = [float(value) for value in re.findall(r'<rect x="([\d.]+)"', svg)]
    width = [float(value) for value in re.findall(r'width="([\d.]+)" height="20"', svg)]
    assert width[1] == pytest.approx(3 * width[0], abs=0.2) and width[2] == pytest.approx(2 * width[0], abs=0.2)
    assert left[1] == pytest.approx(left[0] + width[0], abs=0.1) and width[3] == 0
    limit = float(re.search(r'<line x1="([\d.]+)"', svg)[1])
    assert limit == pytest.approx(left[0] + 2.5 * width[0], abs=0.2)
    assert "<script" not in svg


def test_a_plans_page_has_the_plans_figures(tmp_path):
    layout = Layout(gpus=8, tensor=4, expert=8, sequence_parallel=True)
    run = Run(
        model=GPT_OSS_20B,
        layout=layout,
        training=Training(seq_length=32768, micro_batch=1, global_batch=64, steps=10),
    )
    plan = json.loads(json.dumps(make_plan(run, MACHINES["h200"])))
    plan_page(tmp_path / "plan.html", plan, ["megatron-kd", "plan", "kd.cache=/a b"])
    page = read(tmp_path / "plan.html")
    memory, step = page.tables[0], page.tables[1]
    for row, (name, parts) in zip(memory[1:], plan["memory"].items(), strict=True):
        assert row[0].removesuffix(" *") == name
        assert [float(cell) for cell in row[1:7]] == pytest.approx(
            [value / 1e9 for value in (*parts.values(), sum(parts.values()))], abs=0.051
        )
    assert [float(row[1]) for row in step[1:]] == pytest.approx(
        [s["seconds"] for s in plan["step"].values()], abs=0.006
    )
    assert "Fits (modelled): 80.8 GB" in page.text and "megatron-kd plan 'kd.cache=/a b'" in page.text
    modelled = [heading for heading in page.headings if "modelled" in heading]
    assert len(modelled) == 4


def steps_of(count: int) -> list[dict[str, float]]:
    return [
        {"step": n, "seconds": 1.0 + n, "kd loss": 1 / n, "lm loss": 2 / n, "teacher tail": 0.25, "grad norm": 3.0}
        for n in range(1, count + 1)
    ]


def test_a_comparisons_page(tmp_path):
    methods = [
        {
            "name": "megatron",
            "steps": [{"step": 1, "lm loss": 4.0}],
            "summary": {"lm loss": 4.0, "peak bytes": 3 << 30},
        },
        {
            "name": EVIL,
            "steps": steps_of(3),
            "summary": {
                "lm loss": 0.6667,
                "held-out kl": 0.5,
                "peak bytes": 4 << 30,
                "peak bytes before loss": 1 << 30,
                "peak bytes in loss": 4 << 30,
                FREQUENCY: {"seen once": 0.25, "often": 0.75},
            },
        },
    ]
    found = {
        "settings": {"recipe": "r"},
        "versions": {"torch": "2"},
        "methods": methods,
        "left_out": {"online": "why"},
    }
    compare_page(tmp_path / "compare.html", found, ["megatron-kd", "compare"])
    page = read(tmp_path / "compare.html")
    (table, *_) = page.tables
    assert table[0] == ["", "megatron", EVIL]
    rows = {row[0]: row[1:] for row in table[1:]}
    assert rows["lm loss"] == ["4", "0.6667"] and rows["held-out kl"] == ["", "0.5"]
    assert rows["peak bytes"] == ["3.00 GiB", "4.00 GiB"]
    assert {"Agreement by token frequency", "Memory", "Training", "Watched", "Left out"} <= set(page.headings)
    assert "online: why" in page.text and "Coverage: teacher's mass in the stored entries" in page.text
    assert "Tokens without a stored row" not in page.text  # no run has it


def test_report_of_a_run_that_was_killed_and_went_on(tmp_path, capsys):
    run = tmp_path / "first"
    run.mkdir()
    lines = [json.dumps(step) for step in steps_of(3)]
    again = json.dumps({"step": 3, "seconds": 9.0, "kd loss": 0.125})
    (run / "history.jsonl").write_text("\n".join([*lines, '{"step": 4, "sec', again]) + "\n")
    (run / "config.yaml").write_text("kd: {_target_: x, top_k: 50}\nmodel: {num_layers: 3, unheard_of: 1}\n")
    assert main(["report", str(run)]) == 0
    assert str(run / "report.html") in capsys.readouterr().out
    found = json.loads((run / "report.json").read_text())
    assert [step["step"] for step in found["steps"]] == [1, 2, 3] and found["summary"]["kd loss"] == 0.125
    assert found["settings"] == {"kd": {"top_k": 50}, "model": {"num_layers": 3}} and found["versions"]["torch"]
    rows = list(csv.DictReader((run / "report.csv").open()))
    assert [float(row["kd loss"]) for row in rows] == [1.0, 0.5, 0.125] and rows[2]["lm loss"] == ""
    page = read(run / "report.html")
    assert "not finished" in page.text and ["kd.top_k", "50"] in sum(page.tables, [])
    (run / "finished").touch()
    assert main(["report", str(run), "--out", str(tmp_path / "out.html")]) == 0
    assert "3 steps, finished" in read(tmp_path / "out.html").text


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("{", "is not JSON"), ("[1]", "holds a list"), ("{}", "neither a compare.json")],
)
def test_what_no_page_can_be_made_of(tmp_path, capsys, content, message):
    source = tmp_path / "x.json"
    if content is not None:
        source.write_text(content)
    assert main(["report", str(source)]) == 2
    assert message in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "history.jsonl" in capsys.readouterr().err
