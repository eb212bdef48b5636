"""Stop strings: every length at every offset, however the text is cut into pieces."""

from __future__ import annotations

import random

import pytest

from pagedkv.engine.stop_strings import StopStrings

TEXT = "abcabdabcabcabdab\u00e9\U0001f600 the end. aaab"


def feed(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    """The shown text and the match, with a check that nothing shown is ever taken back."""
    finder = StopStrings(stops, include=include)
    shown = ""
    for piece in pieces:
        shown += finder.push(piece)
        if finder.matched is not None:
            return shown, finder.matched
    return shown + finder.finish(), None


def expected(stops: list[str], text: str, *, include: bool = False) -> tuple[str, str | None]:
    """The rule itself: read character by character until a stop string is complete."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def random_pieces(rng: random.Random, text: str) -> list[str]:
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, len(text))))
    return [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("length", range(1, 13))
def test_a_stop_of_every_length_at_every_offset(length: int, include: bool) -> None:
    rng = random.Random(length)
    for begin in range(len(TEXT) - length + 1):
        stop = TEXT[begin : begin + length]
        right = expected([stop], TEXT, include=include)
        assert right[1] == stop
        for pieces in ([TEXT], list(TEXT), random_pieces(rng, TEXT), random_pieces(rng, TEXT)):
            assert feed([stop], pieces, include=include) == right


def test_several_stops_and_random_cuts_follow_the_rule() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choice("ab") for _ in range(rng.randint(0, 30)))
        stops = [
            "".join(rng.choice("abc") for _ in range(rng.randint(1, 6)))
            for _ in range(rng.randint(1, 4))
        ]
        include = rng.random() < 0.5
        pieces = random_pieces(rng, text)
        assert feed(stops, pieces, include=include) == expected(stops, text, include=include)


def test_only_what_could_become_a_stop_string_is_held_back() -> None:
    finder = StopStrings(["END", "aab"], include=False)
    assert finder.push("the E") == "the "
    assert finder.push("N") == ""
    assert finder.push("D of") == ""
    assert finder.matched == "END"
    finder = StopStrings(["END", "aab"], include=False)
    assert finder.push("EN") == ""
    assert finder.push("Daa"[1:]) == "EN"  # no END after all; "aa" may become "aab"
    assert finder.push("a") == "a"
    assert finder.finish() == "aa"
    assert finder.finish() == ""


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert feed([], list(TEXT)) == (TEXT, None)
    assert StopStrings([], include=False).push("abc") == "abc"
