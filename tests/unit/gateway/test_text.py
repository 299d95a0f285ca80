"""Detokenizer and stop strings: exact, whatever the cut."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from gateway.generation.detokenizer import Detokenizer, unfinished_bytes
from gateway.generation.stop_strings import StopMatcher
from gateway.prompts.served_model import ServedModel


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return [*pieces, data]


sizes = st.lists(st.integers(0, 4), max_size=60)


@given(st.text(), sizes)
def test_text_survives_any_cut(text: str, sizes: list[int]) -> None:
    pieces = cut(text.encode(), sizes)
    detokenizer = Detokenizer(pieces)
    parts = [detokenizer.push(i) for i in range(len(pieces))]
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)
    assert "".join(parts) + detokenizer.finish() == text


@given(st.binary(), sizes)
def test_any_bytes_equal_the_decoded_whole(data: bytes, sizes: list[int]) -> None:
    pieces = cut(data, sizes)
    detokenizer = Detokenizer(pieces)
    parts = [detokenizer.push(i) for i in range(len(pieces))]
    assert "".join(parts) + detokenizer.finish() == data.decode("utf-8", "replace")


@given(ids=st.lists(st.integers(0, 49151), max_size=40))
def test_random_tokens_equal_the_library(model: ServedModel, ids: list[int]) -> None:
    library: tokenizers.Tokenizer = model.tokenizer._inner
    for skip in (True, False):
        pieces = model.tokenizer.pieces if skip else model.tokenizer.pieces_with_special
        detokenizer = Detokenizer(pieces)
        joined = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
        assert joined == model.tokenizer.decode(ids, skip_special_tokens=skip)
        # The library decodes each special token, and the text between, by itself.
        if skip is False and "\ufffd" not in joined:
            assert joined == library.decode(ids, skip_special_tokens=False)


def test_token_outside_the_vocabulary_has_no_text() -> None:
    assert Detokenizer([b"a"]).push(7) == ""


def test_incomplete_end_is_replaced() -> None:
    detokenizer = Detokenizer(["é".encode()[:1]])
    assert detokenizer.push(0) == ""
    assert detokenizer.finish() == "\ufffd"


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: the stop string that completes first ends the text."""
    for end in range(len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            return text[: end - max(map(len, matching))], True
    return text, False


small = st.text("ab\n", max_size=30)
stop_lists = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=4)


@given(small, stop_lists, sizes)
def test_stop_strings_do_not_depend_on_the_cut(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    matcher = StopMatcher(stops)
    shown, stopped = "", False
    for piece in cut(text.encode(), sizes):
        part, stopped = matcher.push(piece.decode())
        shown += part
        if stopped:
            break
    else:
        shown += matcher.finish()
    assert (shown, stopped) == reference(text, stops)


@given(small, stop_lists, sizes)
def test_shown_text_is_never_taken_back(text: str, stops: list[str], sizes: list[int]) -> None:
    final, _ = reference(text, stops)
    matcher = StopMatcher(stops)
    shown = ""
    for piece in cut(text.encode(), sizes):
        part, stopped = matcher.push(piece.decode())
        shown += part
        assert final.startswith(shown)
        if stopped:
            break


@pytest.mark.parametrize(("include", "shown"), [(False, "ab"), (True, "abEND")])
def test_stop_string_can_be_kept(include: bool, shown: str) -> None:
    matcher = StopMatcher(["END"], include=include)
    assert matcher.push("abE") == ("ab", False)
    rest, stopped = matcher.push("NDcd")
    assert ("ab" + rest, stopped) == (shown, True)


BYTES = [bytes([value]) for value in range(256)]


@given(st.text(max_size=20), st.integers(0, 80))
def test_an_output_ends_the_character_that_the_prompt_began(text: str, cut_at: int) -> None:
    """The prompt may end between any two bytes."""
    data = text.encode()
    prompt, output = data[:cut_at], data[cut_at:]
    unfinished = unfinished_bytes(BYTES, prompt)
    detokenizer = Detokenizer(BYTES, unfinished)
    shown = "".join(map(detokenizer.push, output)) + detokenizer.finish()
    whole = prompt.removesuffix(unfinished).decode()  # strict: it ends at a character
    assert whole + shown == text


@given(st.binary(max_size=20), st.binary(max_size=20), st.lists(st.integers(0, 3), max_size=20))
def test_prompt_and_output_of_any_bytes_are_decoded_as_one(
    prompt: bytes, output: bytes, sizes: list[int]
) -> None:
    pieces = cut(prompt, sizes)
    unfinished = unfinished_bytes(pieces, range(len(pieces)))
    assert len(unfinished) <= 3
    detokenizer = Detokenizer(BYTES, unfinished)
    shown = "".join(map(detokenizer.push, output)) + detokenizer.finish()
    whole = prompt.removesuffix(unfinished).decode("utf-8", "replace")
    assert whole + shown == (prompt + output).decode("utf-8", "replace")
