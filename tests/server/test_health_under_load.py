"""Long prompts hold nobody up: texts are tokenized and templates rendered on threads of their own,
and not at all where a prompt is surely too long. Threads are looked at, not clocks.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from serving import Served, serving

from pagedkv.server import Limits
from pagedkv.text import Tokenizer

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("path", "fields", "method"),
    [
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 1}, "encode"),
        ("/v1/completions", {"prompt": [1], "max_tokens": 1, "echo": True}, "decode"),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}, "encode_chat"),
        ("/tokenize", {"prompt": "Hello"}, "encode"),
        ("/tokenize", {"messages": MESSAGES}, "encode_chat"),
        ("/detokenize", {"tokens": [1]}, "decode"),
    ],
)
def test_health_is_answered_while_a_text_is_worked_on(
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    fields: dict[str, Any],
    method: str,
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    right = getattr(Tokenizer, method)

    def slow(self: Tokenizer, *args: Any, **more: Any) -> Any:
        if threading.current_thread().name.startswith("pagedkv-text"):
            begun.set()
            assert may_end.wait(30)
        return right(self, *args, **more)

    monkeypatch.setattr(Tokenizer, method, slow)
    answers: list[int] = []
    thread = threading.Thread(
        target=lambda: answers.append(served.post(path, **fields).status_code)
    )
    thread.start()
    assert begun.wait(30)
    assert served.client.get("/health").status_code == 200
    may_end.set()
    thread.join(30)
    assert answers == [200]


def test_a_prompt_that_is_surely_too_long_is_not_tokenized(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was tokenized")

    limits = Limits(max_body_bytes=2**22)
    with serving(tokenizer_folder, app_options={"limits": limits}) as served:
        monkeypatch.setattr(Tokenizer, "encode", never)
        monkeypatch.setattr(Tokenizer, "encode_chat", never)
        text = "x" * 3_000_000
        for path, fields in (
            ("/v1/completions", {"prompt": text}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
            ("/tokenize", {"prompt": text}),
        ):
            response = served.post(path, **fields)
            assert response.status_code == 400
            assert "max_model_len is 256" in response.json()["error"]["message"]


def test_a_template_that_writes_without_end_is_the_requests_error(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagedkv.text import ChatTemplate

    for source, words in (
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "longer than"),
        ("{{ raise_exception('no tools') }}", "no tools"),
        ("{{ messages.__class__.__mro__ }}", "refused the messages"),
        ("{{ 10 ** 1000 }}", "too large"),
    ):
        template = ChatTemplate(source, {})
        monkeypatch.setattr(served.engine.tokenizer, "_chat_template", template)
        for path in ("/v1/chat/completions", "/tokenize"):
            response = served.post(path, messages=MESSAGES)
            assert response.status_code == 400
            assert words in response.json()["error"]["message"]
    monkeypatch.setattr(served.engine.tokenizer, "_chat_template", None)
    response = served.post("/v1/chat/completions", messages=MESSAGES)
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]
