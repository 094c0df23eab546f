"""`hyper-parallel report`: a run as one page, and how a browser shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from hp_plan import ParallelPlan
from hyper_parallel.commands import cli
from hyper_parallel.reports.output import OutputError
from hyper_parallel.reports.page import report_page

VOID = {"meta", "br", "path", "use", "rect"}


def write_run(folder, steps=30, mesh=None, **changed):
    """Write what a run leaves, without training one."""
    folder.mkdir()
    plan = ParallelPlan.from_dict(
        {
            "model": {"config": "LlamaConfig"},
            "mesh": mesh or {"dp_shard": 2, "tp": 2},
            "run": {"steps": 40},
            "data": {"batch_size": 4, "sequence_length": 16},
        }
    )
    host = {"name": "<host>", "ranks": 4, "device": {"kind": "cpu", "name": "a & b"}}
    start = {
        "time": "2026-01-02T03:04:05+00:00",
        "step": 0,
        "ranks": 4,
        "hosts": [host],
        "versions": {"python": "3.11.7"},
        "git": {"commit": "0123456789abcdef", "changed": ["x"]},
        "data": [{"path": "corpus.bin", "tokens": 12345, "documents": 7, "digest": "d"}],
        "plan": plan.to_dict(),
    }
    (folder / "run.json").write_text(json.dumps({"id": "i", "starts": [start, {**start, "step": 10}]}))
    number = {"grad_norm": 1.0, "lr": 1e-3, "tokens_per_second": 25.6, "peak_memory": 3 << 20, "seconds": 2.5}
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            line = {"step": step, "loss": 5.0 / step, **number, **changed}
            file.write(json.dumps({**line, **({"validation_loss": 2.0} if step % 10 == 0 else {})}) + "\n")
        file.write('{"step": 99, "lo')  # a run that goes on is writing
    (folder / "texts.jsonl").write_text(json.dumps({"step": 20, "text": "to be <or> not"}) + "\n")
    return folder


class Tags(HTMLParser):
    """Counts tags, and finds those that are not closed."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


def test_a_page_holds_all_that_it_shows(tmp_path):
    page = report_page(write_run(tmp_path / "run"))
    tags = Tags()
    tags.feed(page)
    assert tags.open == [] and tags.seen.count("figure") == tags.seen.count("svg") == 5
    # Names of namespaces are no addresses that a browser opens.
    opened = re.findall(r'(?:src|href)="(?!#)[^"]*"|url\((?!#)[^)]*\)|@import', page)
    assert opened == []
    for text in ("LlamaConfig on dp_shard 2 x tp 2", "30 of 40 steps", "about 1/4 of the weights", "rank 3", "1,920"):
        assert text in page
    for text in (
        "&lt;host&gt;",
        "a &amp; b",
        "0123456789 and changes",
        "after step 10",
        "to be &lt;or&gt; not",
        "12,345",
    ):
        assert text in page
    assert "data.sequence_length" in page and "<td>mesh.cp</td>" not in page, "what differs from the defaults"


def test_a_run_of_many_ranks_and_one_without_steps(tmp_path):
    page = report_page(write_run(tmp_path / "many", mesh={"dp_shard": 64, "tp": 8}))
    assert "rank 1<" not in page and "<td>dp_shard</td>" in page and "1/512" in page
    page = report_page(write_run(tmp_path / "none", steps=0))
    assert "No step is done" in page and "There is none yet" in page


def test_losses_that_are_no_numbers_leave_a_page(tmp_path):
    assert "no number" in report_page(write_run(tmp_path / "run", loss=None))


def test_the_command(tmp_path):
    folder = write_run(tmp_path / "run")
    result = CliRunner().invoke(cli.app, ["report", str(folder)])
    assert result.exit_code == 0 and result.output.strip() == str(folder / "report.html")
    assert (folder / "report.html").read_text() == report_page(folder)
    with pytest.raises(OutputError, match="has no run: there is no run.json; name the folder that hyper-parallel"):
        report_page(tmp_path)


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LOOK = """<script>
const boxes = [...document.querySelectorAll("figure svg")].map(each => each.getBoundingClientRect());
document.title = JSON.stringify({
  pictures: boxes.length, least: Math.min(...boxes.map(box => Math.min(box.width, box.height))),
  right: Math.max(...boxes.map(box => box.right)), wide: document.documentElement.scrollWidth, screen: innerWidth });
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on the PATH")
@pytest.mark.parametrize("width", [500, 1280])  # Chromium has no narrower window
def test_a_browser_shows_the_pictures_at_the_width_of_a_phone_and_of_a_desk(tmp_path, width):
    page = report_page(write_run(tmp_path / "run", mesh={"dp_shard": 8, "tp": 8}))
    (tmp_path / "page.html").write_text(page.replace("</body>", f"{LOOK}</body>"))
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom")
    command = [str(BROWSER), *options, f"--window-size={width},900", (tmp_path / "page.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    found = json.loads(re.search(r"<title>(.*?)</title>", shown)[1])  # type: ignore[index]
    assert found["pictures"] == 5 and found["least"] > 100
    assert found["right"] <= found["screen"] and found["wide"] <= found["screen"], "nothing is to be scrolled sideways"


def test_a_page_says_each_warning_once_and_whose_it_was(tmp_path):
    folder = write_run(tmp_path / "run")
    assert "Warnings" not in report_page(folder)
    lines = [{"rank": 1, "text": "UserWarning: a < b"}, {"rank": 0, "text": "UserWarning: a < b"}]
    lines.append({"rank": 0, "text": "UserWarning: another"})
    (folder / "warnings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = report_page(folder)
    assert "<h2>Warnings</h2>" in page
    assert page.count("<td>UserWarning: a &lt; b</td><td>0, 1</td>") == 1
    assert page.count("<td>UserWarning: another</td><td>0</td>") == 1
