"""`pagedkv top` against a real server: what it shows is what the engine holds."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from watched import Watched, watched

from pagedkv.block_manager import Statistics
from pagedkv.cli import main
from pagedkv.cli.live.connection import Connection
from pagedkv.server import Access

FIELDS = [name for name in dir(Statistics) if not name.startswith("_")]


def top(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main(["top", *args, "--interval", "0.6"])
    shown = capsys.readouterr()
    return int(caught.value.code or 0), shown.out, shown.err


@pytest.fixture(scope="module")
def slow(tokenizer_folder: Path) -> Iterator[Watched]:
    """Two may run at once."""
    with watched(tokenizer_folder, max_num_seqs=2, block_size=4) as one:
        yield one


@pytest.fixture
def three(slow: Watched) -> Iterator[list[threading.Thread]]:
    """Requests under way, of which the third waits; they end soon when they have been seen."""
    slow.served.fake.before_step = lambda input_ids: time.sleep(0.1)
    threads = [
        threading.Thread(
            target=slow.served.complete,
            args=(letter * 20,),
            kwargs={"max_tokens": 200, "ignore_eos": True, "user": f"user {letter}"},
        )
        for letter in "abc"
    ]
    for thread in threads:
        thread.start()
    slow.served.wait(lambda: slow.served.engine.num_running == 2)
    slow.served.wait(lambda: slow.served.engine.num_waiting == 1)
    yield threads
    slow.served.fake.before_step = lambda input_ids: None
    for thread in threads:
        thread.join()
    slow.served.wait_idle()


@pytest.mark.usefixtures("three")
def test_queues_requests_and_rates_are_the_engines(
    slow: Watched, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = top(capsys, slow.served.url, "--once", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["queues"]["running"] == 2
    assert found["queues"]["waiting"] == 1
    running, waiting = found["requests"][:2], found["requests"][2:]
    assert {one["user"] for one in found["requests"]} == {"user a", "user b", "user c"}
    assert [one["state"] for one in running] == ["running", "running"]
    assert "waits for one of 2 slots" in waiting[0]["why"]
    assert all(one["num_blocks"] == -(-one["num_tokens"] // 4) for one in running)
    pool = found["statistics"]
    assert pool["num_referenced"] == sum(one["num_blocks"] for one in running)
    assert found["rates"]["decode_tokens_per_s"] > 0
    assert found["rates"]["step_s"] >= 0.1
    assert "time_to_first_token_seconds" in found["latencies"]


@pytest.mark.usefixtures("three")
def test_the_screen_has_them_too(slow: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = top(capsys, slow.served.url)
    assert code == 0
    for words in ("  fake  http", "running 2 of 2  waiting 1", "user a", "waits for one of 2"):
        assert words in out, words


def test_at_rest_every_number_is_the_managers(
    slow: Watched, capsys: pytest.CaptureFixture[str]
) -> None:
    slow.served.wait_idle()
    found = json.loads(top(capsys, slow.served.url, "--once", "--json")[1])
    statistics = slow.served.engine.statistics()
    assert found["statistics"] == {name: getattr(statistics, name) for name in FIELDS}
    assert found["requests"] == []
    slow.served.wait(lambda: slow.num_watchers == 0)


def test_a_server_with_a_key_lets_in_whoever_has_it(
    tokenizer_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PAGEDKV_API_KEY", raising=False)
    with watched(tokenizer_folder, app_options={"access": Access(("secret",))}) as one:
        code, out, err = top(capsys, one.served.url)
        assert (code, out) == (1, "")
        assert f"{one.served.url} needs an API key: --api-key KEY, or PAGEDKV_API_KEY" in err
        assert top(capsys, one.served.url, "--api-key", "wrong")[0] == 1
        code, out, _ = top(capsys, one.served.url, "--api-key", "secret")
        assert (code, "running 0 of 256" in out) == (0, True)


def test_the_end_of_a_server_and_too_many_who_watch_are_told(
    tokenizer_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched(tokenizer_folder) as one:
        url = one.served.url
        others = [Connection(url, api_key=None) for _ in range(8)]
        code, _, err = top(capsys, url)
        assert code == 1
        assert "503: 8 watch already" in err
        for other in others:
            other.close()
        one.served.wait(lambda: one.num_watchers == 0)
        num_looks = 0
        metrics = Connection.metrics

        def counted(connection: Connection) -> str:  # before each line
            nonlocal num_looks
            num_looks += 1
            one.served.server.should_exit = num_looks > 1
            return metrics(connection)

        monkeypatch.setattr(Connection, "metrics", counted)
        code, out, err = top(capsys, url, "--json")
        assert out.count("\n") >= 1
        assert (code, f"{url}: the server has ended the live view" in err) == (1, True)
