"""What a tokenizer tells of a text without encoding it, and what it makes before it is needed."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers_of_tests import byte_level

from pagedkv.text import Tokenizer


def few_bytes() -> Backend:
    """Byte level without tokens for some bytes, which vanish from a text, as SmolLM2's."""
    backend = Backend(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("\u65e5\u672c")])
    return backend


def test_bytes_without_a_token_are_not_counted() -> None:
    tokenizer = Tokenizer(few_bytes(), eos_token_ids=frozenset(), chat_template=None)
    texts = ["ab" * 300, "c" * 600, "acbc" * 300, "\u65e5\u672c" * 50, "\u65e5" * 50, "a\ud800"]
    for text in texts[:-1]:
        num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
        assert tokenizer.fewest_tokens(text) <= num_tokens
    # The longest token has two characters of three bytes each.
    assert [tokenizer.fewest_tokens(one) for one in texts] == [100, 0, 100, 0, 0, 0]
    for change in ("unk_token", "normalizer", "decoder"):
        backend = few_bytes()
        if change == "unk_token":
            backend.model.unk_token = "a"
        elif change == "normalizer":
            backend.normalizer = normalizers.NFC()
        else:
            backend.decoder = decoders.Metaspace()
        other = Tokenizer(backend, eos_token_ids=frozenset(), chat_template=None)
        assert other.fewest_tokens("ab" * 300) == 0, change


def test_what_is_made_when_first_needed_can_be_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(byte_level(), eos_token_ids=frozenset(), chat_template=None)
    tokenizer.prepare()
    monkeypatch.setattr("pagedkv.text.tokenizer.tokenizers.Tokenizer.from_str", None)
    assert (
        tokenizer._encode_plain("the cat <|end|>")
        == tokenizer._without_special.encode("the cat <|end|>").ids
    )
