"""SpecialTokens: finds the special tokens that a text spells, as the tokenizer itself would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tokenizers
from tokenizers import models


class Spelled(NamedTuple):
    """A special token in a text: its id, and the characters that it takes, with those spaces around
    its name that it claims.
    """

    begin: int
    end: int
    token_id: int


class SpecialTokens:
    """The library's own search, in a tokenizer that knows nothing but the added tokens: linear in
    the text however many there are, and other threads run meanwhile.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        self._ids = {token.content: index for index, token in added.items() if token.special}
        self._finder = tokenizers.Tokenizer(models.BPE({}, []))
        if backend.normalizer is not None:
            self._finder.normalizer = backend.normalizer
        self._finder.add_special_tokens([token for token in added.values() if token.special])
        self._finder.add_tokens([token for token in added.values() if not token.special])

    def find(self, texts: Sequence[str]) -> list[list[Spelled]]:
        """Of each text, in order. REQUIRES texts without lone surrogates."""
        return [
            [
                Spelled(begin, end, self._ids[name])
                for name, (begin, end) in zip(one.tokens, one.offsets, strict=True)
                if name in self._ids
            ]
            for one in self._finder.encode_batch(list(texts), add_special_tokens=False)
        ]
