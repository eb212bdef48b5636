"""Streams of text: their parts joined are the full decode, whatever the tokens and the cuts."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from tokenizers_of_tests import BACKENDS, TEXTS, byte_fallback, byte_level

from pagedkv.text import IncrementalDecoder, Tokenizer, token_bytes


def wrap(backend: Backend) -> Tokenizer:
    return Tokenizer(backend, eos_token_ids=frozenset(), chat_template=None)


@pytest.fixture(scope="module", params=BACKENDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return wrap(BACKENDS[request.param]())


def stream(tokenizer: Tokenizer, pieces: list[list[int]], skip: bool) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
    return [*map(decoder.push, pieces), decoder.finish()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_every_split_of_a_text_joins_to_the_full_decode(
    tokenizer: Tokenizer, text: str, skip: bool
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    full = tokenizer.decode(ids, skip_special_tokens=skip)
    for cut in range(len(ids) + 1):
        assert "".join(stream(tokenizer, [ids[:cut], ids[cut:]], skip)) == full
    parts = stream(tokenizer, [[one] for one in ids], skip)
    assert "".join(parts) == full
    # No character is shown in halves. (The backend itself takes the letter of an added token for
    # the byte that it may also stand for.)
    if "straße" not in text:
        assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("skip", [True, False])
def test_any_ids_at_all_join_to_the_full_decode(tokenizer: Tokenizer, skip: bool) -> None:
    """Random ids: lone bytes, special tokens in between, ids that do not exist."""
    rng = random.Random(0)
    bytes_first = range(min(260, tokenizer.vocab_size))
    for _ in range(1500):
        limit = rng.choice([tokenizer.vocab_size, tokenizer.vocab_size + 20, len(bytes_first)])
        ids = [rng.randrange(limit) for _ in range(rng.randrange(12))]
        pieces, at = [], 0
        while at < len(ids):
            step = rng.randint(1, 3)
            pieces.append(ids[at : at + step])
            at += step
        full = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(stream(tokenizer, pieces, skip)) == full, ids


@pytest.mark.parametrize("character", ["é", "海", "😀"])
def test_a_character_comes_whole_with_its_last_byte(character: str) -> None:
    """One token a byte, of which each but the last shows nothing."""
    tokenizer = wrap(byte_level())
    ids = [byte_token(tokenizer, byte) for byte in character.encode()]
    assert stream(tokenizer, [[one] for one in ids], True) == [""] * (len(ids) - 1) + [
        character,
        "",
    ]


def byte_token(tokenizer: Tokenizer, byte: int) -> int:
    """The token of a single byte, by the letter that the backend writes for it."""
    letters = {}
    for character in "ab\x80é海😀":
        ((word, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(character)
        letters.update(zip(character.encode(), word, strict=True))
    index = tokenizer.backend.token_to_id(letters[byte])
    assert index is not None
    return index


def test_a_byte_that_cannot_go_on_is_replaced_at_once_and_the_stream_goes_on() -> None:
    tokenizer = wrap(byte_level())
    lone = [byte_token(tokenizer, byte) for byte in (0x80, ord("a"), 0xF0, 0x9F, ord("b"), 0xE6)]
    assert stream(tokenizer, [[one] for one in lone], True) == [
        "\ufffd", "a", "", "", "\ufffdb", "", "\ufffd",
    ]  # fmt: skip
    assert tokenizer.decode(lone) == "\ufffda\ufffdb\ufffd"


def test_an_end_inside_a_character_is_one_replacement() -> None:
    for backend in (byte_level(), byte_fallback()):
        tokenizer = wrap(backend)
        ids = tokenizer.encode("a🦄", add_special_tokens=False)[:-1]
        parts = stream(tokenizer, [[one] for one in ids], True)
        assert "".join(parts) == tokenizer.decode(ids)
        assert "\ufffd" in parts[-1]
        assert not any("\ufffd" in part for part in parts[:-1])


def test_a_decoder_is_as_new_after_finish(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the cat 海", add_special_tokens=False)
    decoder = IncrementalDecoder(tokenizer)
    first = decoder.push(ids[:-1]) + decoder.finish()
    assert first == tokenizer.decode(ids[:-1])
    assert decoder.push(ids) + decoder.finish() == tokenizer.decode(ids)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_a_token_costs_the_same_however_long_the_text_is(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Backend]
) -> None:
    """Counted in ids handed to the full decode: a few for each token, not all that came before."""
    tokenizer = wrap(make())
    ids = tokenizer.encode("the cat sat on 海 " * 200, add_special_tokens=False)
    counts: list[int] = []
    plain = Tokenizer.decode

    def counting(self: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> str:
        counts.append(len(ids))
        return plain(self, ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    decoder = IncrementalDecoder(tokenizer)
    for one in ids:
        decoder.push([one])
    assert sum(counts) <= 4 * len(ids)
    assert max(counts, default=0) <= 8


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        (None, r"\[\]"),
        (decoders.WordPiece(), "WordPiece"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.CTC()]), "CTC"),
        (decoders.Strip(" ", 0, 1), "Strip"),
        (decoders.Strip(" ", 2, 0), "Strip"),
        (decoders.Replace("ab", "c"), "Replace"),
    ],
)
def test_a_way_of_decoding_that_looks_further_is_refused(decoder: object, name: str) -> None:
    backend = Backend(models.BPE({"a": 0, "b": 1}, []))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(ValueError, match=f"{name}.* cannot be streamed; supported are ByteLevel"):
        IncrementalDecoder(wrap(backend))


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_a_texts_tokens_joined_are_its_own(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = b"".join(token_bytes(tokenizer, one) for one in ids)
    full = tokenizer.decode(ids, skip_special_tokens=False)
    # A text's first space may be one that encoding has put there.
    assert whole.decode(errors="replace") in (full, " " + full)


def test_a_token_that_is_part_of_a_character_has_its_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\U0010ffff", add_special_tokens=False)
    if len(ids) > 1:  # a vocabulary with a token for each byte
        assert token_bytes(tokenizer, ids[-1]) == b"\xbf"
    else:
        assert token_bytes(tokenizer, ids[0]) == b" "  # all that is left of it


def test_ids_beyond_the_vocabulary_have_no_bytes(tokenizer: Tokenizer) -> None:
    assert token_bytes(tokenizer, tokenizer.vocab_size) == b""
