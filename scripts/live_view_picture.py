"""Makes docs/inspect.png: the page of `pagedkv inspect` behind a step of a small run, on a model
that makes tokens up. Needs Chromium. Usage: scripts/live_view_picture.py [FILE.png]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "inspect"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "engine"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "replay"))

from chromium import Page, browsing
from fake_model import make_tokenizer_folder
from recorded_runs import RecordedRun

from pagedkv.inspect.page import recorded_page
from pagedkv.inspect.recorded import recorded_lines
from pagedkv.replay import Recording, looks
from pagedkv.sampling_params import SamplingParams

ROOT = Path(__file__).parent.parent
SYSTEM = "You are a helpful assistant that answers in few words. "
QUESTIONS = ("Why is the sky blue?", "Name a prime.", "What is paging?", "Who wrote Faust?") * 5


def record(folder: Path) -> Recording:
    """Prompts that begin alike, some with several answers, in a pool too small for all of them."""
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    run = RecordedRun(
        make_tokenizer_folder(tokenizer),
        folder / "run.jsonl",
        num_gpu_blocks_override=420,
        max_num_seqs=20,
        max_num_batched_tokens=96,
        max_model_len=256,
        swap_space=2e-6,
        preemption_mode="swap",
    )
    for i, question in enumerate(QUESTIONS):
        params = SamplingParams(
            max_tokens=90, n=1 + (i % 3), temperature=1.0, seed=i, ignore_eos=True
        )
        run.engine.add_request(f"chat-{i}", SYSTEM + question * (1 + i % 3), params)
        for _ in range(3):
            run.engine.step()
    return run.recording()


def busiest(recording: Recording) -> int:
    """A step that copies, preempts or evicts, with many that run and some that wait."""
    steps = [one.line["step"] for one in recording.steps]
    return (
        max(
            range(1, len(steps)),
            key=lambda i: (
                bool(steps[i]["copies"]) + bool(steps[i]["preempted"]) + bool(steps[i]["evicted"]),
                len(steps[i]["slots"]),
            ),
        )
        + 1
    )


def take(page: Page, url: str, place: int) -> bytes:
    page.open(url)
    page.wait("pagedkv.seek")
    page.evaluate(f"(pagedkv.seek({place - 1}), pagedkv.seek({place}))")
    page.wait("!pagedkv.page.isDirty")
    page.click(*page.center("#list-running .row"))
    page.wait("document.querySelector('#whose').textContent.startsWith('chat')")
    page.move(900, 5)
    page.wait("pagedkv.page.pointed === null")
    page.evaluate(f"(pagedkv.seek({place - 1}), pagedkv.seek({place}))")  # its events anew
    page.wait("!pagedkv.page.isDirty")
    return page.screenshot()


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "inspect.png"
    with tempfile.TemporaryDirectory() as name, browsing(Path(name) / "profile") as page:
        recording = record(Path(name))
        lines = recorded_lines(
            recording.facts,
            block_size=recording.cache.block_size,
            max_num_seqs=recording.scheduler.max_num_seqs,
            looks=looks(recording),
        )
        html = Path(name) / "run.html"
        html.write_text(recorded_page(lines).html)
        target.write_bytes(take(page, html.as_uri(), busiest(recording)))
    print(f"{target}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
