"""Tokenizers from GGUF metadata: equal to what they describe, to transformers' and to a plain
statement of SentencePiece's rule; everything else refused.
"""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tokenizers_of_tests import LINES, TEXTS, byte_fallback, byte_level

from pagedkv.text import IncrementalDecoder, Tokenizer, load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def gpt2_metadata(pre: object = "gpt-2", **more: object) -> dict[str, object]:
    """The metadata of the byte-level test tokenizer, as a converter would write them."""
    described = json.loads(byte_level().to_str())
    vocab = {**described["model"]["vocab"]}
    types = dict.fromkeys(vocab.values(), NORMAL)
    for token in described["added_tokens"]:
        vocab[token["content"]] = token["id"]
        types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    tokens = sorted(vocab, key=vocab.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([types[vocab[token]] for token in tokens]),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in described["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": vocab["<|start|>"],
        "tokenizer.ggml.eos_token_id": vocab["<|end|>"],
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def llama_metadata(**more: object) -> dict[str, object]:
    """A SentencePiece vocabulary: unknown, begin, end, all bytes, then pieces by their score."""
    learned = json.loads(byte_fallback().to_str())["model"]["vocab"]
    pieces = [token for token in learned if not token.startswith("<")]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    scores = [0.0] * 259 + [-float(index) for index in range(len(pieces))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types),
        "tokenizer.ggml.scores": np.array(scores, dtype=np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


@pytest.mark.parametrize("text", [*TEXTS, *LINES[:5]])
def test_a_byte_level_vocabulary_tokenises_as_its_original(text: str) -> None:
    original, tokenizer = byte_level(), load_tokenizer(gpt2_metadata())
    ids = tokenizer.encode(text)
    assert ids == original.encode(text).ids
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == original.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("llama3", "pay 1234", "pay| |123|4"),
        ("llama-v3", "pay 1234", "pay| |123|4"),
        ("deepseek-r1-qwen", "pay 1234", "pay| |1|2|3|4"),
        ("gpt-2", "I'LL pay 1234  $!!\n ok", "I|'|LL| pay| 1234| | $!!|\n| ok"),
        ("gpt-2", "it's  a\tb", "it|'s| | a|\t|b"),
        ("smollm", "it's 12", "it|'s| |1|2"),
        (
            "llama-bpe",
            "I'LL pay 1234567 $!!\r\n\n  ok\t x",
            "I|'LL| pay| |123|456|7| $!!\r\n\n| | ok|\t| x",
        ),
        ("qwen2", "I'LL pay 1234 $!!\r\n\n  ok\t x", "I|'LL| pay| |1|2|3|4| $!!\r\n\n| | ok|\t| x"),
        ("llama-bpe", "(word)\n \n海9 ", "(word|)\n| \n|海|9| "),
    ],
)
def test_text_is_cut_into_words_as_the_kind_of_vocabulary_says(
    pre: str, text: str, words: str
) -> None:
    backend = load_tokenizer(gpt2_metadata(pre)).backend
    assert backend.pre_tokenizer is not None
    found = [text[begin:end] for _, (begin, end) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert found == words.split("|")


@pytest.mark.parametrize(("pre", "composes"), [("qwen2", True), ("gpt-2", False)])
def test_qwen2_composes_characters_before_it_tokenises(pre: str, composes: bool) -> None:
    tokenizer = load_tokenizer(gpt2_metadata(pre))
    apart, composed = "cafe\u0301", "caf\u00e9"
    assert (tokenizer.encode(apart) == tokenizer.encode(composed)) == composes


def test_llama3_takes_a_word_that_is_a_token_whole() -> None:
    """Its merges do not lead to every token."""
    metadata = gpt2_metadata("llama-bpe", add_bos_token=False, merges=["x y"])
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    metadata["tokenizer.ggml.tokens"] = [*tokens, "xyz", "xy"]
    metadata["tokenizer.ggml.token_type"] = np.array([NORMAL] * (len(tokens) + 2))
    assert load_tokenizer(metadata).encode("xyz") == [len(tokens)]
    cut = load_tokenizer({**metadata, "tokenizer.ggml.pre": "gpt-2"}).encode("xyz")
    assert cut == [len(tokens) + 1, tokens.index("z")]


def sentencepiece(metadata: dict[str, object], text: str) -> list[int]:
    """SentencePiece's rule as plainly as it can be said: join the two neighbours whose union is the
    best scored token, leftmost first, until there are none; what is no token becomes its bytes."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]  # type: ignore[assignment]
    scores = np.asarray(metadata["tokenizer.ggml.scores"]).tolist()
    ids = {token: index for index, token in enumerate(tokens)}
    parts = list(("▁" + text if text else "").replace(" ", "▁"))
    while True:
        joins = [
            (-scores[ids[a + b]], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in ids
        ]
        if not joins:
            break
        _, at = min(joins)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [
        index
        for part in parts
        for index in ([ids[part]] if part in ids else [3 + byte for byte in part.encode()])
    ]


def test_sentencepiece_tokens_are_those_of_the_plain_rule() -> None:
    metadata = llama_metadata(add_bos_token=False)
    tokenizer = load_tokenizer(metadata)
    rng = random.Random(0)
    letters = "the catsondlog,語日é🌊 "
    texts = [*LINES[:5], *("".join(rng.choices(letters, k=rng.randrange(30))) for _ in range(300))]
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == sentencepiece(metadata, text), text
        assert tokenizer.decode(ids) == text
        decoder = IncrementalDecoder(tokenizer)
        assert "".join([*(decoder.push([one]) for one in ids), decoder.finish()]) == text


def test_sentencepiece_without_the_leading_space() -> None:
    tokenizer = load_tokenizer(llama_metadata(add_space_prefix=False, add_bos_token=False))
    for text in ("the cat", " the cat", "  x"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer.encode("the")[:1]) != " "


@pytest.mark.parametrize(
    ("metadata", "frame"),
    [
        (gpt2_metadata(), ((), ())),
        (gpt2_metadata(add_bos_token=True), (("<|start|>",), ())),
        (gpt2_metadata(add_eos_token=True), ((), ("<|end|>",))),
        (gpt2_metadata("llama-bpe"), (("<|start|>",), ())),
        (gpt2_metadata("llama3"), (("<|start|>",), ())),
        (gpt2_metadata("llama-bpe", add_bos_token=False), ((), ())),
        (llama_metadata(), (("<s>",), ())),
        (llama_metadata(add_eos_token=True), (("<s>",), ("</s>",))),
        (llama_metadata(add_bos_token=False), ((), ())),
    ],
)
def test_tokens_around_a_text_are_those_that_the_file_asks_for(
    metadata: dict[str, object], frame: tuple[tuple[str, ...], tuple[str, ...]]
) -> None:
    tokenizer = load_tokenizer(metadata)
    first, last = ([tokenizer.backend.token_to_id(name) for name in part] for part in frame)
    bare = tokenizer.encode("the cat", add_special_tokens=False)
    assert tokenizer.encode("the cat") == [*first, *bare, *last]


def test_end_tokens_and_template_come_from_the_file() -> None:
    metadata = gpt2_metadata(eot_token_id=5)
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    tokenizer = load_tokenizer(metadata)
    assert tokenizer.eos_token_ids == {metadata["tokenizer.ggml.eos_token_id"], 5}
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat) == "<|start|>hi<|end|>"
    assert load_tokenizer(gpt2_metadata(eos_token_id=None)).eos_token_ids == frozenset()


def test_control_tokens_are_special_and_user_defined_ones_are_not() -> None:
    tokenizer = load_tokenizer(gpt2_metadata())
    ids = tokenizer.encode("zü rich<|end|>")
    assert tokenizer.decode(ids) == "zü rich"
    assert len(ids) == 2


def with_tokens(*more: str, of_type: int = NORMAL) -> dict[str, object]:
    """A SentencePiece vocabulary with further tokens, and a template."""
    metadata: dict[str, Any] = llama_metadata(add_bos_token=False)
    more = tuple(one for one in more if one not in metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += more
    for key, added in (("token_type", of_type), ("scores", -1000.0)):
        known = metadata[f"tokenizer.ggml.{key}"]
        metadata[f"tokenizer.ggml.{key}"] = np.array([*known, *[added] * len(more)])
    return {**metadata, "tokenizer.chat_template": "<turn>{{ messages[0].content }}</s>"}


def with_scores(value: float) -> dict[str, object]:
    metadata: dict[str, Any] = llama_metadata()
    metadata["tokenizer.ggml.scores"][-1] = value
    return metadata


def test_parts_of_a_control_tokens_name_do_not_join_to_it() -> None:
    """Control tokens score 0, better than any piece; bytes have names too."""
    tokenizer = load_tokenizer(with_tokens(*"<>/s", "</", "s>", "<0", "x0A>"))
    for text in ("</s>", "a </s> b", "<0x0A>"):
        ids = tokenizer.encode_chat([{"role": "user", "content": text}])
        assert [one for one in ids if one in tokenizer.special_token_ids] == [2]
        assert ids[-1] == 2
        assert tokenizer.decode(ids) == f"<turn>{text}"
    assert tokenizer.encode("</s>")[-1] == 2


@pytest.mark.parametrize("of_type", [USER_DEFINED, NORMAL])
def test_what_begins_a_turn_is_special_whatever_its_type(of_type: int) -> None:
    """As in some files of Gemma: only the template makes these tokens, not a message."""
    metadata: dict[str, Any] = with_tokens("<turn>", "<b>", "\n", of_type=of_type)
    turn, bold = map(metadata["tokenizer.ggml.tokens"].index, ("<turn>", "<b>"))
    if of_type == NORMAL:
        metadata["tokenizer.ggml.eot_token_id"] = turn
    tokenizer = load_tokenizer(metadata)
    assert tokenizer.special_token_ids == {0, 1, 2, turn}
    ids = tokenizer.encode_chat([{"role": "user", "content": "<turn><b>"}])
    assert (ids[0], ids[1:].count(turn), ids.count(bold)) == (turn, 0, int(of_type == USER_DEFINED))


@pytest.mark.parametrize("name", ["$B", "$A", "a b", ":", "$A:1", " "])
def test_a_token_around_a_text_may_have_any_name(name: str) -> None:
    metadata: dict[str, Any] = with_tokens(name, of_type=CONTROL)
    last = len(metadata["tokenizer.ggml.tokens"]) - 1
    metadata |= {"tokenizer.ggml.bos_token_id": last, "tokenizer.ggml.add_bos_token": True}
    assert load_tokenizer(metadata).encode("the") == [last, *sentencepiece(metadata, "the")]


def without(metadata: dict[str, object], key: str) -> dict[str, object]:
    return {name: value for name, value in metadata.items() if name != f"tokenizer.ggml.{key}"}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "model is None; supported are gpt2 and llama"),
        (gpt2_metadata(model="bert"), "model is 'bert'; supported are gpt2 and llama"),
        (gpt2_metadata("default"), "pre is 'default'; supported are gpt-2, smollm, llama-bpe"),
        (without(gpt2_metadata(), "pre"), "pre is None; supported are"),
        (without(gpt2_metadata(), "tokens"), "tokens is missing or not a list of texts"),
        (gpt2_metadata(tokens=[]), "tokens is missing or not a list of texts"),
        (gpt2_metadata(tokens=["a", "a"]), "tokens holds some token twice"),
        (gpt2_metadata(token_type=np.ones(3)), "token_type is not a list of ... numbers"),
        (without(gpt2_metadata(), "merges"), "merges is missing or not a list"),
        (gpt2_metadata(merges=["no token"]), "merges are malformed"),
        (gpt2_metadata(merges=["a"]), "merges are malformed"),
        (gpt2_metadata(eos_token_id=10**6), "eos_token_id is 1000000, not an id below"),
        (gpt2_metadata(bos_token_id=-1), "bos_token_id is -1, not an id below"),
        (gpt2_metadata(token_type=np.full(376, 7)), "token_type has the unknown type 7"),
        (gpt2_metadata(add_bos_token=5), "add_bos_token is 5, neither true nor false"),
        (gpt2_metadata(["gpt-2"]), r"pre is \['gpt-2'\]; supported are gpt-2"),
        (gpt2_metadata(model=["gpt2"]), r"model is \['gpt2'\]; supported are gpt2 and llama"),
        ({**gpt2_metadata(), "tokenizer.chat_template": 5}, "chat_template is 5, not a text"),
        (with_tokens("a" * 257), "tokens has one of 257 characters, more than 256"),
        (with_scores(float("nan")), "scores is missing or not finite"),
        (with_scores(float("inf")), "scores is missing or not finite"),
        (gpt2_metadata(eot_token_id="x"), "eot_token_id is 'x', not an id below"),
        (without(llama_metadata(), "scores"), "scores is missing"),
        (llama_metadata(scores=np.zeros(3)), "scores is not a list of ... numbers"),
        (llama_metadata(unknown_token_id=True), "unknown_token_id is True, not an id"),
        (
            {**gpt2_metadata(), "tokenizer.chat_template": "{% if %}"},
            "the chat template has a syntax error",
        ),
    ],
)
def test_metadata_that_cannot_be_are_refused(metadata: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_tokenizer(metadata)


@pytest.mark.model
def test_smollm2_chats_and_streams() -> None:
    from pagedkv.weights import open_checkpoint

    tokenizer: Tokenizer = load_tokenizer(open_checkpoint("smollm2").tokenizer_source)
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == {2}
    chat = [{"role": "user", "content": "2024 <|im_end|> 海🌊"}]
    ids = tokenizer.encode_chat(chat)
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\n2024 <|im_end|> 海🌊<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [one for one in ids if one in tokenizer.special_token_ids] == [1, 2, 1, 2, 1]
    assert {"2", "0", "4"} <= {tokenizer.decode([one]) for one in ids}
    decoder = IncrementalDecoder(tokenizer)
    parts = [decoder.push([one]) for one in ids]
    assert "".join([*parts, decoder.finish()]) == tokenizer.decode(ids)
    assert not any("\ufffd" in part for part in parts)
