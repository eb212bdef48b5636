"""`pagedkv inspect FILE`: a recorded run as one page, whole in itself, with a slider through its
steps; and the page of a large pool.
"""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chromium import Page
from page_state import check_page
from recorded_runs import RecordedRun, random_run
from test_frames import Large

from pagedkv.cli import main
from pagedkv.inspect.page import recorded_page
from pagedkv.inspect.recorded import recorded_lines
from pagedkv.records import RunFacts
from pagedkv.replay import Recording, looks


@pytest.fixture(scope="module")
def recording(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Forks, beams, aborts, swaps, failing steps."""
    path = tmp_path_factory.mktemp("recorded") / "run.jsonl"
    run = RecordedRun(tokenizer_folder, path, swap_space=1e-6, preemption_mode="swap")
    random_run(run, 5)
    return run.recording()


def inspect(*args: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", *args])
    return int(ended.value.code or 0)


def test_the_slider_shows_the_run_behind_every_step_both_ways(
    browser: Page, recording: Recording, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "run.html"
    assert inspect(str(recording.path), "-o", str(page)) == 0
    num_steps = len(recording.steps)
    assert capsys.readouterr().out == f"{num_steps} steps are in {page}\n"
    right = list(looks(recording))
    assert len(right) == num_steps + 1
    browser.open(page.as_uri())
    browser.wait("pagedkv.seek")
    assert browser.evaluate("document.querySelector('#link').textContent") == "recorded"
    assert browser.evaluate("Number(document.querySelector('#slider').max)") == num_steps
    for place in (0, 1, num_steps, num_steps // 2, num_steps // 2 + 1, 3, num_steps - 1, 0):
        browser.evaluate(
            f"((slider) => {{ slider.value = {place}; slider.dispatchEvent(new Event('input')); }})"
            "(document.querySelector('#slider'))"
        )
        check_page(browser.evaluate("pagedkv.state()"), right[place][0], right[place][1])
        browser.wait("!pagedkv.page.isDirty")
        shown = browser.evaluate("document.querySelector('#place').textContent")
        assert shown.startswith(f"after step {place} of {num_steps}, ")
        last = browser.evaluate("pagedkv.page.run.steps.at(-1)?.[0] ?? 0")
        assert last == place
    browser.click(*browser.center("#play"))
    browser.wait("document.querySelector('#slider').value >= 2")
    browser.click(*browser.center("#play"))
    assert browser.evaluate("document.querySelector('#play').textContent") == "Play"


def test_a_page_is_shown_to_this_machine_only(recording: Recording) -> None:
    command = [sys.executable, "-m", "pagedkv", "inspect", str(recording.path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r"http://127\.0\.0\.1:(\d+)/ until Ctrl-C", line)
        assert match is not None, line
        for path, host, status in (
            ("/", "localhost", 200),
            ("/", "127.0.0.1", 200),
            ("/", "evil.example", 400),
            ("/other", "localhost", 404),
        ):
            connection = http.client.HTTPConnection("127.0.0.1", int(match[1]), timeout=30)
            connection.request("GET", path, headers={"host": f"{host}:{match[1]}"})
            response = connection.getresponse()
            assert response.status == status
            if status == 200:
                assert b'id="recording"' in response.read()
                policy = response.headers["content-security-policy"]
                assert "connect-src 'none'" in policy
            connection.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def test_what_is_wrong_is_told_by_exit_code_1(
    recording: Recording, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "none.jsonl").write_text("{}\n")
    (tmp_path / "there.html").write_text("mine")
    for args, message in (
        (["missing.jsonl"], "missing.jsonl"),
        ([str(tmp_path / "none.jsonl")], "line 1: "),
        ([str(recording.path), "-o", str(tmp_path / "there.html")], "exists already"),
        ([str(recording.path), "-o", str(tmp_path / "no" / "folder.html")], "folder.html"),
    ):
        assert inspect(*args) == 1
        assert message in capsys.readouterr().err
    assert (tmp_path / "there.html").read_text() == "mine"


def test_a_large_pool_is_drawn_by_what_has_changed(browser: Page, tmp_path: Path) -> None:
    large = Large()
    taken: list[Any] = []
    for _ in range(4):
        large.step()
        taken.append(large.view.take())
    facts = RunFacts("large", "float32", 1, 1, 1, 8, 4096, 100_000, 0)
    lines = recorded_lines(facts, block_size=16, max_num_seqs=1024, looks=taken)
    (tmp_path / "large.html").write_text(recorded_page(lines).html)
    browser.open((tmp_path / "large.html").as_uri())
    browser.wait("pagedkv.seek && !pagedkv.page.isDirty")
    assert browser.evaluate(
        "grid.columns * grid.rows >= 100000 && grid.rows * grid.edge <= grid.canvas.height"
    )
    assert browser.evaluate("document.querySelector('#num-running').textContent") == "1024"
    assert browser.evaluate("document.querySelectorAll('*').length") < 600  # rows in sight only
    num_changed = browser.evaluate("(pagedkv.seek(1), new Set(pagedkv.page.run.changed).size)")
    tables = taken[1][0].statistics.num_referenced - taken[0][0].statistics.num_referenced
    assert 0 < num_changed <= tables + 2 * 1024  # what is new, and the last blocks' fill
    browser.evaluate("pagedkv.seek(3)")
    check_page(browser.evaluate("pagedkv.state()"), taken[3][0], taken[3][1])
