"""Tokenizer: text to token ids and back, and conversations to prompts. Made by load_tokenizer.

Special tokens in text. encode() turns the names of special tokens in its text into these tokens, so
that a prompt may be written out by hand. encode_chat() never does so in what the messages hold: a
user who writes "<|im_end|>" has written ten characters, not the end of the turn. Neither what a
normalizer makes of other characters nor what merges make of the parts of a name changes that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property

import tokenizers

from pagedkv.text.byte_alphabet import BYTE_ALPHABET
from pagedkv.text.chat_template import ChatTemplate, Message, check_messages
from pagedkv.text.special_tokens import SpecialTokens, Spelled

# Put inside special tokens' names while a template runs. Noncharacters: never part of a text.
_MARKS = "\ufdd0\ufdd1\ufdd2\ufdd3"


@contextmanager
def value_errors(what: str) -> Iterator[None]:
    """The tokenizers library raises plain exceptions for what is wrong in a file, and, where its
    code took something for impossible, one that is not even an Exception: both become ValueError.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(f"{what}: {error}") from error
        raise


class Tokenizer:
    """A tokenizer and its chat template. Safe to use from several threads.

    eos_token_ids: the ids that end a text. vocab_size: one more than the largest id.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: frozenset[int],
        chat_template: ChatTemplate | None,
    ) -> None:
        # A file may carry settings for training batches.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.eos_token_ids = eos_token_ids
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self._chat_template = chat_template
        self._special = {
            index: token
            for index, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        self.special_token_ids = frozenset(self._special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; with add_special_tokens also what the model expects around it.

        Raises:
            ValueError: the text cannot be written as UTF-8 (it holds a lone surrogate), or the
                tokenizer's file lets it fail.
        """
        return _encode(self.backend, text, add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no character become U+FFFD, unknown ids nothing."""
        with value_errors("the tokenizer cannot decode the ids"):
            # By the batch form: it alone lets other threads run, which many ids would hold up.
            (text,) = self.backend.decode_batch([list(ids)], skip_special_tokens)
        return str(text)

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True
    ) -> str:
        """The prompt of a conversation as text, to be encoded without add_special_tokens.

        For prompts of strangers use encode_chat: in the text of a prompt nobody can tell a special
        token of the template from one that a message spells out.

        Raises:
            ValueError: there is no chat template, or it refuses the messages.
        """
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)

    def encode_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation's prompt, in which only the template makes special tokens.

        Raises:
            ValueError: there is no chat template, or it refuses the messages.
        """
        check_messages(messages)
        texts = [_checked(text) for text in _texts(messages)]
        if not any(self._spelled_in(texts)):
            text = self.apply_chat_template(messages, add_generation_prompt)
            ids = self.encode(text, add_special_tokens=False)
            written = [one.token_id for one in self._spelled(text)]
            if self._without_unknown(ids) == self._without_unknown(written):
                return ids
            # A normalizer has made names of other characters.
            return self._encode_marked(text, None)
        everything = "".join(texts)
        mark = next((one for one in _MARKS if one not in everything), None)
        if mark is None:
            raise ValueError(f"messages hold all of the noncharacters {_MARKS!r}")
        # "<|im_end|>" in a message becomes "<" + mark + "|im_end|>" until the template has run.
        # What then still spells a special token, the template has written.
        marked = [
            {key: self._broken(value, mark) for key, value in message.items()}
            for message in messages
        ]
        text = self.apply_chat_template(marked, add_generation_prompt)
        return self._encode_marked(text, mark)

    def _broken(self, value: object, mark: str) -> object:
        """value with the mark inside each special token's name."""
        if isinstance(value, str):
            parts, at = [], 0
            for begin, end, _ in self._spelled(value):
                named = value[begin:end].lstrip()
                inside = max(end - len(named), begin) + 1
                parts.append(value[at:inside] + mark)
                at = inside
            return "".join([*parts, value[at:]])
        if isinstance(value, Mapping):
            return {key: self._broken(one, mark) for key, one in value.items()}
        if isinstance(value, Sequence):
            return [self._broken(one, mark) for one in value]
        return value

    def _encode_marked(self, text: str, mark: str | None) -> list[int]:
        """mark: what stands in names that are none, and is left out."""
        ids: list[int] = []
        at = 0
        for begin, end, index in self._spelled(text):
            if mark is None or mark not in text[begin:end]:  # a normalizer may not see it
                ids += self._encode_plain(text[at:begin].replace(mark or "", ""))
                ids.append(index)
                at = end
        return ids + self._encode_plain(text[at:].replace(mark or "", ""))

    def _spelled(self, text: str) -> list[Spelled]:
        """The special tokens that a text names."""
        return self._spelled_in([_checked(text)])[0]

    def _spelled_in(self, texts: list[str]) -> list[list[Spelled]]:
        with value_errors("the tokenizer cannot search the text"):
            return self._finder.find(texts)

    def _encode_plain(self, text: str) -> list[int]:
        """Token ids of a text without special tokens, whatever it says."""
        ids: list[int] = []
        parts = [text] if text else []
        while parts:
            part = parts.pop()
            encoded = _encode(self._without_special, part, False)
            if not any(self._is_spelled(index, part) for index in encoded.ids):
                ids += encoded.ids
                continue
            # Merges lead to a token's name: it is cut behind its first character.
            encoded = _encode(self._without_special, part, False, has_offsets=True)
            cuts = [
                begin + 1
                for index, (begin, end) in zip(encoded.ids, encoded.offsets, strict=True)
                if end - begin > 1 and self._is_spelled(index, part[begin:end])
            ]
            if cuts:
                ends = zip([0, *cuts], [*cuts, len(part)], strict=True)
                parts += reversed([part[begin:end] for begin, end in ends])
            else:
                ids += encoded.ids
        return ids

    def prepare(self) -> None:
        """Make now what is made when first needed, which holds up all threads for a moment."""
        _ = self._without_special, self._finder, self._token_bound

    def fewest_tokens(self, text: str) -> int:
        """At most as many tokens as the text has, told without encoding it: no token is longer than
        the longest. 0 where one token can stand for any text that the vocabulary does not know.
        """
        if self._token_bound is None:
            return 0
        max_chars, unknown = self._token_bound
        if not unknown:
            return len(text) // max_chars
        return len(text.encode("utf-8", "surrogatepass").translate(None, unknown)) // max_chars

    @cached_property
    def _token_bound(self) -> tuple[int, bytes] | None:
        """(characters of a text that one token can stand for, bytes that no token stands for).
        A normalizer may shorten the text: NFC makes one character of up to four. Where some bytes
        have no token, those of a text vanish, and the others are counted as bytes. None: there is
        no bound, since an unknown byte becomes part of a token.
        """
        vocab = self.backend.get_vocab(with_added_tokens=True)
        longest = max(len(name) for name in vocab)
        fallback = [f"<0x{byte:02X}>" for byte in range(256)]
        missing = bytes(byte for name, byte in BYTE_ALPHABET.items() if name not in vocab)
        if not missing or all(name in vocab for name in fallback):
            return longest * (1 if self.backend.normalizer is None else 4), b""
        types = {part.get("type") for part in self.decoder_parts}
        drops_unknown = getattr(self.backend.model, "unk_token", "") is None
        if "ByteLevel" not in types or not drops_unknown or self.backend.normalizer is not None:
            return None
        added = self.backend.get_added_tokens_decoder().values()
        return max(longest, *(len(token.content.encode()) for token in added)), missing

    def _is_spelled(self, index: int, text: str) -> bool:
        """Whether a token is a special one that text has made; text that the vocabulary lacks makes
        the unknown token.
        """
        token = self._special.get(index)
        return token is not None and (index != self._unknown_id or token.content in text)

    def _without_unknown(self, ids: list[int]) -> list[int]:
        return [one for one in ids if one in self._special and one != self._unknown_id]

    @cached_property
    def _unknown_id(self) -> int | None:
        name = getattr(self.backend.model, "unk_token", None)
        return None if name is None else self.backend.token_to_id(name)

    @property
    def _template(self) -> ChatTemplate:
        if self._chat_template is None:
            raise ValueError("the model has no chat template; give it a prompt of plain text")
        return self._chat_template

    @cached_property
    def _without_special(self) -> tokenizers.Tokenizer:
        """The same tokenizer, blind to special tokens in text. Made when first needed."""
        twin = tokenizers.Tokenizer.from_str(self.backend.to_str())
        twin.encode_special_tokens = True
        return twin

    @cached_property
    def _finder(self) -> SpecialTokens:
        return SpecialTokens(self.backend)

    @cached_property
    def decoder_parts(self) -> list[Mapping[str, object]]:
        """The steps by which the backend turns tokens into text, as its file describes them."""
        if self.backend.decoder is None:
            return []
        described = json.loads(self.backend.decoder.__getstate__())
        return described["decoders"] if described["type"] == "Sequence" else [described]


def _encode(
    backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool, *, has_offsets: bool = False
) -> tokenizers.Encoding:
    """By the batch forms: they alone let other threads run, which a long text would hold up."""
    encode = backend.encode_batch if has_offsets else backend.encode_batch_fast
    checked = _checked(text)
    with value_errors("the tokenizer cannot encode the text"):
        (encoded,) = encode([checked], add_special_tokens=add_special_tokens)
    return encoded


def _checked(text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text is not valid Unicode: character {error.start} is a lone surrogate"
            ) from error
    return text


def _texts(value: object) -> list[str]:
    """All strings inside messages, keys left out."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for one in value.values() for text in _texts(one)]
    if isinstance(value, Sequence):
        return [text for one in value for text in _texts(one)]
    return []
