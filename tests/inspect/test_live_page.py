"""The page at /inspect in headless Chromium: it renders, updates, follows a fork, shows events, and
its numbers equal the manager's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Page
from page_state import check_page
from serving import WAIT_S
from watched import Pacer, Watched, watched

from pagedkv.server import Access

LETTERS = list(range(97, 123))
PROMPT: dict[str, Any] = {"ignore_eos": True, "allowed_token_ids": LETTERS}


@pytest.fixture
def shown(tokenizer_folder: Path) -> Iterator[Watched]:
    options: dict[str, Any] = {
        "num_gpu_blocks_override": 40,
        "block_size": 4,
        "max_num_seqs": 4,
        "watermark": 0.0,
        "swap_space": 1e-6,
        "preemption_mode": "swap",
    }
    with watched(tokenizer_folder, **options) as one:
        yield one


def open_page(browser: Page, shown: Watched) -> None:
    browser.open(shown.url)
    browser.wait("pagedkv.page.run && pagedkv.page.run.version > 0")


def settle(browser: Page, shown: Watched, num_steps: int) -> dict[str, Any]:
    """What the page knows once it has all of so many steps and the last look."""
    browser.wait(f"pagedkv.page.run.steps.at(-1)?.[0] >= {num_steps}")
    look = shown.looks[-1]
    for _ in range(50):  # a look may be on its way
        browser.wait("!pagedkv.page.isDirty")
        state: dict[str, Any] = browser.evaluate("pagedkv.state()")
        if shown.looks[-1] is look and state["states"] == look[0].states.tolist():
            break
        look = shown.looks[-1]
    check_page(state, look[0], look[1])
    return state


def number(browser: Page, label: str) -> str:
    """As the header shows it."""
    shown: str = browser.evaluate(
        "[...document.querySelectorAll('#numbers div')]"
        f".find((one) => one.firstChild.textContent === {label!r}).children[1].textContent"
    )
    return shown


def color(browser: Page, block: int) -> list[int]:
    """In the middle of a block's cell, above its number, as drawn."""
    pixel: list[int] = browser.evaluate(
        f"(() => {{ const [x, y] = grid.at({block}); return [...grid.context.getImageData("
        "x + grid.edge / 2, y + 3, 1, 1).data].slice(0, 3); })()"
    )
    return pixel


class Sender(threading.Thread):
    """A completion on its own thread."""

    def __init__(self, shown: Watched, **fields: Any) -> None:
        super().__init__()
        self._shown, self._fields = shown, fields
        self.start()

    def run(self) -> None:
        self._shown.served.complete(**self._fields)

    def end(self) -> None:
        self.join(WAIT_S)
        assert not self.is_alive()


def test_it_renders_updates_and_equals_the_manager(browser: Page, shown: Watched) -> None:
    open_page(browser, shown)
    assert browser.evaluate("document.querySelector('#link').textContent") == "live"
    pacer = Pacer(shown.served)
    sender = Sender(shown, prompt="x" * 10, max_tokens=12, n=2, **PROMPT, temperature=1, seed=3)
    pacer.let(3)
    state = settle(browser, shown, 3)
    statistics = shown.looks[-1][0].statistics
    assert (statistics.num_referenced, statistics.num_shared) == (4, 2)  # 12 tokens each, 8 shared
    shared, own = state["requests"][0]["table"][0], state["requests"][0]["table"][2]
    assert color(browser, shared) == browser.evaluate("SHARED_COLOR")
    assert color(browser, own) == browser.evaluate(f"grid.color(pagedkv.page.run, {own})")
    assert color(browser, own) == browser.evaluate(
        f"laneColor([...pagedkv.page.run.requests.values()].find(r => r.table[2] === {own}).lane)"
    )
    assert number(browser, "referenced / shared") == "4 / 2"
    assert number(browser, "block occupancy") == "10.0 %"
    assert number(browser, "token occupancy") == f"{100 * statistics.token_occupancy:.1f} %"
    assert number(browser, "evicted / copied") == f"0 / {statistics.num_copies}" == "0 / 1"
    assert "copy-on-write: block" in browser.evaluate("document.querySelector('#events').innerText")
    assert browser.evaluate("document.querySelectorAll('#list-running .row').length") >= 2
    assert len(state["requests"]) == 2

    pacer.let(4)
    later = settle(browser, shown, 7)
    assert later["requests"][0]["tokens"] == state["requests"][0]["tokens"] + 4
    assert number(browser, "step") == "7"
    pacer.open()
    sender.end()
    settle(browser, shown, shown.served.fake.num_steps)
    assert browser.evaluate("document.querySelector('#num-running').textContent") == "0"


def test_it_follows_a_fork_and_a_pointer(browser: Page, shown: Watched) -> None:
    first = shown.served.complete("y" * 10, max_tokens=4, keep_seconds=60, temperature=0, **PROMPT)
    open_page(browser, shown)
    pacer = Pacer(shown.served)
    forked = threading.Thread(
        target=lambda: shown.served.ok(
            "/v1/fork", id=first["id"], prompt="zz", max_tokens=8, n=2, temperature=1, **PROMPT
        )
    )
    before = shown.served.fake.num_steps
    forked.start()
    pacer.let(3)
    state = settle(browser, shown, before + 3)
    pinned = [one for one in state["requests"] if one["state"] == "pinned"]
    answers = [one for one in state["requests"] if one["state"] == "running"]
    assert (len(pinned), len(answers)) == (1, 2)
    block = pinned[0]["table"][0]
    assert all(one["table"][0] == block for one in answers)
    assert state["refs"][block] == 3

    browser.click(*browser.center("#list-running .row"))
    browser.wait("document.querySelector('#whose').textContent !== 'click a request'")
    browser.move(*browser.center("#table .entries span"))
    browser.wait(f"document.querySelector('#told').textContent.includes('→ block {block}')")
    told = browser.evaluate("document.querySelector('#told').textContent")
    assert told.startswith(f"logical 0 → block {block}: referenced, ref count 3; held by ")
    assert all(f"{one['id']}[0]" in told for one in answers)
    assert browser.evaluate("grid.lit") == [block]
    x, y = browser.evaluate(
        f"(() => {{ const box = grid.marks.getBoundingClientRect(), [x, y] = grid.at({block});"
        "return [box.x + x + grid.edge / 2, box.y + y + grid.edge / 2]; })()"
    )
    browser.move(x, y)
    browser.wait(f"document.querySelector('#told').textContent.startsWith('block {block}:')")
    pacer.open()
    forked.join(WAIT_S)
    shown.served.service.conversations._engine._loop.call_soon_threadsafe(  # type: ignore[union-attr]
        shown.served.service.conversations.forget, first["id"]
    )
    shown.served.wait(lambda: shown.served.engine.statistics().num_referenced == 0)


def test_it_shows_who_waits_and_why_and_what_is_swapped_and_evicted(
    browser: Page, shown: Watched
) -> None:
    open_page(browser, shown)
    pacer = Pacer(shown.served)
    senders = [
        Sender(shown, prompt=str(i) * 30, max_tokens=40, temperature=0, user=f"user {i}", **PROMPT)
        for i in range(6)
    ]
    shown.served.wait(lambda: shown.served.engine.num_waiting == 6)
    pacer.let(3)
    state = settle(browser, shown, 3)
    waiting = [one for one in state["requests"] if one["state"] == "waiting"]
    assert {one["why"].split(";")[0] for one in waiting} & {
        "waits for one of 4 slots (max_num_seqs)", "waits for 8 blocks"
    }  # fmt: skip
    listed = browser.evaluate("document.querySelector('#list-waiting').innerText")
    assert waiting[0]["id"][-18:] in listed
    pacer.open()
    for sender in senders:
        sender.end()
    num_steps = shown.served.fake.num_steps
    settle(browser, shown, num_steps)
    statistics = shown.served.engine.statistics()
    assert statistics.num_swapped_out > 0
    rows = browser.evaluate("pagedkv.page.run.steps")
    assert sum(row[8] for row in rows) == statistics.num_swapped_out
    assert sum(row[10] for row in rows) == statistics.num_evictions > 0
    preempted = sum(row[6] for row in rows)
    assert preempted == shown.served.service.engine.snapshot.num_preemptions > 0
    assert sum(row[3] + row[4] for row in rows) == shown.served.fake.num_tokens
    out, back = number(browser, "swapped out / in").split(" / ")
    assert (int(out), int(back)) == (statistics.num_swapped_out, statistics.num_swapped_in)


def test_it_asks_for_the_key_and_keeps_it_to_itself(browser: Page, tokenizer_folder: Path) -> None:
    options = {"access": Access(("the-key",))}
    with watched(tokenizer_folder, app_options=options) as shown:
        browser.open(shown.url)
        browser.wait("!document.querySelector('#ask').hidden")
        for key, then in (("wrong", "#refused"), ("the-key", "#model")):
            browser.evaluate(f"document.querySelector('#key').value = {key!r}")
            browser.click(*browser.center("#ask button"))
            browser.wait(f"document.querySelector({then!r}).textContent !== ''")
        browser.wait("document.querySelector('#link').textContent === 'live'")
        assert browser.evaluate("document.querySelector('#ask').hidden")
        assert browser.evaluate("document.querySelector('#key').value") == ""
        assert browser.evaluate("location.href") == shown.url
        kept = browser.evaluate("[localStorage.length, sessionStorage.length, document.cookie]")
        assert kept == [0, 0, ""]
    browser.wait("document.querySelector('#link').textContent.startsWith('not connected: ')")
    refused = "Failed to load resource: the server responded with a status of 401 (Unauthorized)"
    browser.problems[:] = [one for one in browser.problems if one != refused]
    gone = "Failed to load resource: net::ERR_"
    browser.problems[:] = [one for one in browser.problems if not one.startswith(gone)]


@pytest.mark.parametrize("echo", [True, False])  # whether the engine is given the text at all
@pytest.mark.parametrize("shows_text", [True, False])
def test_prompts_are_shown_only_where_that_is_allowed(
    browser: Page, tokenizer_folder: Path, shows_text: bool, echo: bool
) -> None:
    with watched(tokenizer_folder, shows_text=shows_text) as shown:
        open_page(browser, shown)
        pacer = Pacer(shown.served)
        sender = Sender(shown, prompt="<b>secret</b>", max_tokens=4, echo=echo, **PROMPT)
        pacer.let(2)
        browser.wait("pagedkv.page.run.steps.at(-1)?.[0] >= 2 && !pagedkv.page.isDirty")
        browser.click(*browser.center("#list-running .row"))
        browser.wait("document.querySelector('#whose').textContent !== 'click a request'")
        text = browser.evaluate("document.body.innerText")
        assert ("<b>secret</b>" in text) == shows_text
        pacer.open()
        sender.end()
