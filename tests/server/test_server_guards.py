"""What a server keeps to itself and from others: no code and no address comes in with a request, no
text goes into the log, and no tenant sees anything of another's.
"""

from __future__ import annotations

import ast
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Served, serving, whole_text

import pagedkv.server
from pagedkv.server import Access

MARK = "violet-elephant"
URL = "http://127.0.0.1:9/x"

# Fields by which other servers have run, compiled, unpickled or fetched what a client named.
DANGEROUS: dict[str, Any] = {
    "logits_processors": ["os.system"],
    "custom_logit_processor": "gASVAA==",
    "prompt_embeds": "gASVAA==",
    "chat_template": "{{ 1 }}",
    "chat_template_kwargs": {"tokenize": True},
    "guided_json": {"type": "object"},
    "guided_regex": "(a+)+$",
    "guided_grammar": "root ::= root",
    "structured_outputs": {"regex": "(a+)+$"},
    "mm_processor_kwargs": {},
    "multi_modal_data": {"image": URL},
    "media_io_kwargs": {},
    "documents": [{"url": URL}],
    "tools": [{"type": "function"}],
    "kv_transfer_params": {"remote_host": "127.0.0.1"},
    "lora_path": "/etc/passwd",
    "trust_remote_code": True,
    "vllm_xargs": {},
    "__class__": "x",
}


@pytest.mark.parametrize("field", DANGEROUS)
def test_nothing_in_a_request_is_run_compiled_or_fetched(served: Served, field: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    for path, fields in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/fork", {"id": "x"}),
        ("/tokenize", {"messages": messages}),
    ):
        response = served.post(path, **fields, **{field: DANGEROUS[field]})
        assert response.status_code == 400
        assert response.json()["error"]["message"] == f"{field} is not supported by this server"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file"])
def test_a_message_is_text(served: Served, kind: str) -> None:
    content = [{"type": kind, kind: {"url": URL}}]
    response = served.post("/v1/chat/completions", messages=[{"role": "user", "content": content}])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


def test_the_server_has_nothing_to_fetch_or_start_programs_with() -> None:
    forbidden = {
        "aiohttp", "httpx", "http", "importlib", "marshal", "multiprocessing", "pickle", "requests",
        "shelve", "subprocess", "urllib", "urllib3",
    }  # fmt: skip
    folder = Path(pagedkv.server.__file__).parent
    files = list(folder.rglob("*.py"))
    assert len(files) > 20
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not forbidden & {name.split(".")[0] for name in names}, path


def test_the_log_holds_nothing_that_a_client_has_sent(
    tokenizer_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    for name in ("asyncio", "httpx", "httpcore", "h11"):  # the client's own
        logging.getLogger(name).setLevel(logging.WARNING)
    options = {"access": Access((f"{MARK}-key",)), "log_interval_s": 0.01}
    with serving(tokenizer_folder, app_options=options) as served:
        bad = {"authorization": f"Bearer {MARK}"}
        assert served.client.get("/v1/models", headers=bad).status_code == 401
        served.client.headers["authorization"] = f"Bearer {MARK}-key"
        fields = {"prompt": MARK, "user": MARK, "cache_salt": MARK, "stop": [MARK], "max_tokens": 4}
        served.ok("/v1/completions", **fields)
        served.events("/v1/completions", **fields)
        served.ok("/tokenize", prompt=MARK)
        served.fake.is_bad = lambda context: True
        assert served.post("/v1/completions", **fields).status_code == 500
        served.fake.is_bad = lambda context: False
        for wrong in ({"model": f"{MARK}\n\x1b[31m"}, {MARK: 1}, {"n": MARK}, {"id": MARK}):
            assert served.post("/v1/completions", prompt="x", **wrong).status_code in (400, 404)
        served.client.get(f"/{MARK}", headers={"x-name": MARK, "host": MARK})
        with monkeypatch.context() as patched:
            patched.setattr("pagedkv.server.submitting.check_size", None)
            assert served.post("/v1/completions", **fields).status_code == 500
    assert "an error of the server's own" in caplog.text
    assert MARK not in caplog.text


def test_two_tenants_at_once_see_their_own_alone(tokenizer_folder: Path) -> None:
    keys = ("first", "second")
    options = {"access": Access(keys)}
    with serving(tokenizer_folder, app_options=options, max_num_seqs=8) as served:

        def ask(number: int) -> tuple[str, int]:
            """(all text that came for it, tokens found in the cache)."""
            key, fields = keys[number % 2], {"max_tokens": 12, "temperature": 0, "n": 1}
            prompt = f"{keys[number % 2]} tenant asks question {number // 4}, long enough to cache"
            with httpx.Client(
                base_url=served.url, headers={"authorization": f"Bearer {key}"}, timeout=60
            ) as client:
                one = Served(served.url, served.engine, served.server, served.service, client)
                events = one.events(
                    "/v1/completions",
                    prompt=prompt,
                    echo=True,
                    stream_options={"include_usage": True},
                    **fields,
                )
            cached = events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert len({event["id"] for event in events}) == 1
            return whole_text(events, 0), cached

        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(ask, range(32)))
        for number, (text, _) in enumerate(found):
            assert text.startswith(f"{keys[number % 2]} tenant asks question {number // 4},")
            assert keys[1 - number % 2] not in text
            assert text == found[number // 4 * 4 + number % 2][0]  # of the same prompt and key
        assert sum(cached for _, cached in found) > 0
        served.client.headers["authorization"] = "Bearer second"
        for path in ("/metrics", "/v1/models", "/version"):
            assert "question" not in served.client.get(path).text
