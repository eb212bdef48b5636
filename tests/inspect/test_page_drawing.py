"""What the page draws, pixel by pixel: a bar and marks for each step, events as they come, and how
full last blocks are. A recorded run shows it, which has the same drawing and stands still.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Page
from recorded_runs import RecordedRun, random_run

from pagedkv.inspect.page import recorded_page
from pagedkv.inspect.recorded import recorded_lines
from pagedkv.replay import looks

BACKGROUND = [28, 31, 38]
PREFILL, DECODE, PREEMPTED, COPIES, SWAP_OUT, SWAP_IN, EVICTED = 3, 4, 6, 7, 8, 9, 10  # of a row


def rgb(css: str) -> list[int]:
    return list(bytes.fromhex(css.removeprefix("#")))


@pytest.fixture(scope="module")
def file(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forks, preemptions, swaps and evictions, as a page."""
    folder = tmp_path_factory.mktemp("drawn")
    run = RecordedRun(
        tokenizer_folder, folder / "run.jsonl", swap_space=1e-6, preemption_mode="swap"
    )
    random_run(run, 5)
    recording = run.recording()
    lines = recorded_lines(
        recording.facts,
        block_size=recording.cache.block_size,
        max_num_seqs=recording.scheduler.max_num_seqs,
        looks=looks(recording),
    )
    (folder / "run.html").write_text(recorded_page(lines).html)
    return folder / "run.html"


@pytest.fixture
def page(browser: Page, file: Path) -> Iterator[Page]:
    """Behind the last step."""
    browser.open(file.as_uri())
    browser.wait("pagedkv.seek && !pagedkv.page.isDirty")
    seek(browser, browser.evaluate("Number(document.querySelector('#slider').max)"))
    yield browser
    browser.move(0, 0)


def seek(page: Page, place: int) -> None:
    page.evaluate(f"pagedkv.seek({place})")
    page.wait("!pagedkv.page.isDirty")


def test_each_step_has_a_bar_and_marks_and_tells_its_numbers(page: Page) -> None:
    rows = page.evaluate("pagedkv.page.run.steps.slice(timeline.first)")
    assert len(rows) > 20
    colors = {name: rgb(css) for name, css in page.evaluate("STEP_COLORS").items()}
    marks = {
        "preempted": [row[PREEMPTED] for row in rows],
        "swapped": [row[SWAP_OUT] + row[SWAP_IN] for row in rows],
        "copies": [row[COPIES] for row in rows],
        "evicted": [row[EVICTED] for row in rows],
    }
    for name, numbers in marks.items():
        assert 0 < sum(map(bool, numbers)) < len(rows), name
    pixels = page.evaluate(
        "pagedkv.page.run.steps.slice(timeline.first).map((_, i) => [0, 1, 2, 3, null].map((j) => {"
        "const y = j === null ? timeline.canvas.height - 1 : 4 * j + 1;"
        "return [...timeline.context.getImageData(i * timeline.pitch + 1, y, 1, 1).data]"
        ".slice(0, 3); }))"
    )
    for i, row in enumerate(rows):
        for j, (name, numbers) in enumerate(marks.items()):
            assert pixels[i][j] == (colors[name] if numbers[i] else BACKGROUND), (row, name)
        kind = "decode" if row[DECODE] else "prefill"
        bar = colors[kind] if row[DECODE] + row[PREFILL] else BACKGROUND
        assert pixels[i][-1] == bar, row

    x, y = page.evaluate(
        "(({ x, y, height }) => [x, y + height / 2])(timeline.canvas.getBoundingClientRect())"
    )
    for i in (0, len(rows) // 2):
        page.move(x + 5 * i + 2, y)
        told = (
            f"step {rows[i][0]}: {rows[i][5]} rows, {rows[i][PREFILL]} prefill and "
            f"{rows[i][DECODE]} decode tokens, "
        )
        page.wait(f"document.querySelector('#told').textContent.startsWith({told!r})")


@pytest.mark.parametrize(
    ("column", "kind", "words"),
    [
        (COPIES, "copy", "copy-on-write: block "),
        (SWAP_OUT, "swap", "swap out: block "),
        (SWAP_IN, "swap", "swap in: CPU block "),
        (EVICTED, "evict", "evicted: cached block "),
        (PREEMPTED, None, "preempted: "),
    ],
)
def test_what_happens_in_a_step_is_told_and_flashes(
    page: Page, column: int, kind: str | None, words: str
) -> None:
    steps = [row[0] for row in page.evaluate("pagedkv.page.run.steps") if row[column]]
    seek(page, steps[0] - 1)
    # Drawn at the moment at which it begins to fade, and looked at before anything else is drawn.
    flashes: list[tuple[str, list[int], list[list[int]]]] = page.evaluate(
        f"(() => {{ pagedkv.seek({steps[0]}); const run = pagedkv.page.run;"
        "grid.drawMarks(run, 1e6);"
        "return run.flashes.map(({ kind, blocks }) => [kind, blocks, blocks.map((block) => {"
        "const [x, y] = grid.at(block);"
        "return [...grid.overlay.getImageData(x + grid.edge / 4, y + 1, 1, 1).data]; })]); })()"
    )
    page.wait("!pagedkv.page.isDirty")
    events: list[str] = page.evaluate("pagedkv.page.run.events.map((one) => one.text)")
    assert any(one.startswith(words) for one in events)
    shown = page.evaluate(
        "[...document.querySelectorAll('#events li')].map((one) => one.textContent)"
    )
    assert [one for one in shown if one] == events[-4:][::-1]
    colors = {name: [*rgb(css), 255] for name, css in page.evaluate("FLASH_COLORS").items()}
    last = {block: one for one, blocks, _ in flashes for block in blocks}  # drawn over the others
    drawn = {block: pixels[i] for _, blocks, pixels in flashes for i, block in enumerate(blocks)}
    assert drawn == {block: colors[one] for block, one in last.items()}
    assert kind is None or kind in last.values()


def test_a_last_block_is_dark_above_what_is_filled(page: Page) -> None:
    num_found = 0
    for place in page.evaluate("pagedkv.page.run.steps.map((row) => row[0])")[:30:6]:
        seek(page, place)
        cells: list[dict[str, Any]] = page.evaluate(
            "(() => { const { run } = pagedkv.page, found = [];"
            "const pixel = (x, y) => [...grid.context.getImageData(x, y, 1, 1).data].slice(0, 3);"
            "for (let block = 0; block < run.numBlocks; block++) {"
            "  const [x, y] = grid.at(block), fill = run.fills[block] / run.blockSize;"
            "  if (run.states[block] === REFERENCED && run.refs[block] === 1)"
            "    found.push({ fill, color: grid.color(run, block), top: pixel(x + 2, y + 1),"
            "      bottom: pixel(x + 2, y + grid.edge - 3) }); }"
            "return found; })()"
        )
        for cell in cells:
            dark = [int(0.4 * part) for part in cell["color"]]
            top = cell["color"] if cell["fill"] == 1 else dark
            assert all(abs(a - b) <= 1 for a, b in zip(cell["top"], top, strict=True)), cell
            assert cell["bottom"] == (cell["color"] if cell["fill"] else dark), cell
            num_found += cell["fill"] < 1
    assert num_found > 0
