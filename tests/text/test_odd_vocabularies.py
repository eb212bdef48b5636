"""Vocabularies of GGUF files with odd tokens, types, scores and merges: a tokenizer that encodes,
decodes and streams, or one clear error; never a panic of the library below.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from test_gguf_vocabulary import gpt2_metadata, llama_metadata

from pagedkv.text import IncrementalDecoder, Tokenizer, load_tokenizer

TEXTS = ["", "hello the cat", "日本 😀  x\n\n12 $A <s> </s> <|end|>", "\0", "a </s> b <0x41>"]
ODD = [
    *("", " ", "  ", "$A", "$B", "$", "a b", ":", "a:1", "$A:0", "\n", "<0x41>", "<0xZZ>", "▁▁"),
    *("\0", "é", "a" * 300, "A", "[CLS]", "<0x41", "日本", "\ufffd", "</", "s>", "<", ">"),
]
PREFIX = "tokenizer.ggml."
PRE = ("gpt-2", "smollm", "llama-bpe", "qwen2")


def odd_metadata(rng: random.Random) -> dict[str, Any]:
    made: dict[str, Any] = rng.choice([llama_metadata, lambda: gpt2_metadata(rng.choice(PRE))])()
    tokens: list[str] = list(made[PREFIX + "tokens"])
    num_added = 0
    for odd in rng.sample(ODD, 4):
        if odd not in tokens and rng.random() < 0.7:
            num_added += 1
            tokens.append(odd)
    if rng.random() < 0.3:
        tokens[rng.randrange(len(tokens))] = "replaced"
    types = [*made[PREFIX + "token_type"].tolist(), *[1] * num_added]
    for _ in range(rng.randint(0, 4)):
        types[rng.randrange(-8, 8)] = rng.choice([*range(7), *range(1, 7), -1, 7])
    made |= {PREFIX + "tokens": tokens, PREFIX + "token_type": np.array(types)}
    if PREFIX + "scores" in made:
        scores = [*made[PREFIX + "scores"].tolist(), *[0.0] * num_added]
        if rng.random() < 0.3:
            scores[-1] = rng.choice([np.nan, np.inf, 1e30, -1e30])
        made[PREFIX + "scores"] = np.array(scores, np.float32)
    else:
        known = set(tokens)
        pairs = (merge.split(" ", 1) for merge in made[PREFIX + "merges"])
        merges = [" ".join(pair) for pair in pairs if {*pair, "".join(pair)} <= known]
        if rng.random() < 0.2:
            merges[0] = rng.choice(["", " ", "a", "a b", "a b c", "x  y"])
        made[PREFIX + "merges"] = merges
    for name in ("bos", "eos", "eot", "unknown"):
        if rng.random() < 0.4:
            made[f"{PREFIX}{name}_token_id"] = rng.randrange(-1, len(tokens))
    for name in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        if rng.random() < 0.4:
            made[PREFIX + name] = rng.choice([True, False])
    return made


def check(tokenizer: Tokenizer, tokens: list[str], rng: random.Random) -> None:
    assert tokenizer.vocab_size == len(tokens)
    assert [tokenizer.backend.id_to_token(index) for index in range(len(tokens))] == tokens
    ids_of_all = [tokenizer.encode(text) for text in TEXTS]
    ids_of_all.append([rng.randrange(len(tokens) + 3) for _ in range(20)])
    for ids in ids_of_all:
        decoder = IncrementalDecoder(tokenizer)
        parts = [decoder.push([one]) for one in ids]
        assert "".join([*parts, decoder.finish()]) == tokenizer.decode(ids)


def test_odd_vocabularies_work_or_are_refused() -> None:
    rng = random.Random(0)
    outcomes = [0, 0]
    for _ in range(250):
        metadata = odd_metadata(rng)
        try:
            tokenizer = load_tokenizer(metadata)
        except ValueError as error:
            if "GGUF metadata: tokenizer.ggml." not in str(error):
                raise
            outcomes[0] += 1
            continue
        check(tokenizer, metadata[PREFIX + "tokens"], rng)
        outcomes[1] += 1
    assert min(outcomes) > 50, outcomes
