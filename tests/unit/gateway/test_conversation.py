"""Turns and their way back to the client's fields; answers as parts."""

from __future__ import annotations

import pytest

from gateway.generation.choice import Delta, EndReason
from gateway.generation.parts import AnswerCall, AnswerParts, AnswerText, Closed, Grown, Opened
from gateway.prompts.conversation import MAX_MESSAGES, MAX_PARTS, Conversation, FieldNames
from gateway.tools.parser import ToolCallPiece
from mesh.errors import ContextTooLong, InvalidRequest
from mesh.messages import TokenLogprobs


@pytest.mark.parametrize(
    ("param", "message", "name", "shown"),
    [
        ("messages[1].tool_calls[0].id", "messages[1].tool_calls[0].id: no", "input[4].id",
         "input[4].id: no"),
        ("messages[12].role", "bad messages[12].role", "input[12].role", "bad input[12].role"),
        ("messages", "over messages, not messages_x", "input", "over input, not messages_x"),
        ("max_tokens", "min_max_tokens and max_tokens 3", "max_output_tokens",
         "min_max_tokens and max_output_tokens 3"),
        ("seed", "seed: no", "seed", "seed: no"),
    ],
)  # fmt: skip
def test_errors_are_renamed(param: str, message: str, name: str, shown: str) -> None:
    names = FieldNames({"messages": "input", "max_tokens": "max_output_tokens"})
    names.add("messages[1]", "input[2]")
    names.add("messages[1].tool_calls[0]", "input[4]")
    error = ContextTooLong(message, param=param)
    names.rename(error)
    assert (error.param, str(error)) == (name, shown)


def test_conversations_are_bounded() -> None:
    conversation = Conversation(FieldNames({}))
    for _ in range(MAX_MESSAGES):
        conversation.add_text("user", "x", "input")
    with pytest.raises(InvalidRequest, match="messages"):
        conversation.add_text("user", "x", "input")
    conversation = Conversation(FieldNames({}))
    for _ in range(MAX_PARTS):
        conversation.add_text("user", ["x"], "input", join=True)
    with pytest.raises(InvalidRequest, match="texts"):
        conversation.add_text("user", ["x"], "input", join=True)
    assert len(conversation.messages) == 1


def delta(text: str = "", *calls: ToolCallPiece, reason: EndReason | None = None) -> Delta:
    entry = TokenLogprobs(token_id=1, logprob=-0.5, top=())
    return Delta(text, 1, reason, entry, calls)


def test_parts_follow_each_other() -> None:
    parts = AnswerParts()
    assert parts.add(delta()) == []
    changes = parts.add(delta("a"))
    assert [type(change) for change in changes] == [Opened, Grown]
    begin = ToolCallPiece(0, "", "call_1", "f")
    changes = parts.add(delta("b", begin))
    assert [type(change) for change in changes] == [Grown, Closed, Opened]
    assert [change.index for change in changes] == [0, 0, 1]
    # The end of one call, text, and the next call, in one token.
    second = ToolCallPiece(1, "{}", "call_2", "g")
    changes = parts.add(delta("c", ToolCallPiece(0, "{}"), second, reason="tool_calls"))
    assert [type(change) for change in changes] == [
        Grown, Closed, Opened, Grown, Closed, Opened, Grown, Closed,
    ]  # fmt: skip
    assert [change.index for change in changes] == [1, 1, 2, 2, 2, 3, 3, 3]
    first, call, text, last = parts.parts
    assert isinstance(first, AnswerText)
    assert (first.text, len(first.logprobs)) == ("ab", 3), "a token without text counts"
    assert isinstance(text, AnswerText)
    assert text.text == "c"
    assert [call, last] == [AnswerCall("call_1", "f", "{}"), AnswerCall("call_2", "g", "{}")]


def test_an_answer_without_text_has_no_parts() -> None:
    parts = AnswerParts()
    assert parts.add(delta(reason="stop")) == []
    assert parts.parts == []
