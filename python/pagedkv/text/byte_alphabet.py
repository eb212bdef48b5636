"""How byte-level vocabularies (GPT-2's and those after it) write bytes as characters."""

from __future__ import annotations


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary, to the byte.

    Printable Latin-1 bytes stand for themselves, the others in order for U+0100 and up.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update((chr(0x100 + index), byte) for index, byte in enumerate(others))
    return alphabet


BYTE_ALPHABET = _byte_alphabet()
