"""How models write tool calls in their text.

    hermes   <tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call>          Hermes, Qwen
    llama3   {"name": "f", "parameters": {…}}                 the whole answer   Llama 3.x
    mistral  [TOOL_CALLS][{"name": "f", "arguments": {…}}]                         Mistral

The same description serves the grammar, the parser and the prompt. Models that were made for none
of them are taught the first one in the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mesh.model_text.tokenizer import Tokenizer

ToolFormatName = Literal["hermes", "llama3", "mistral"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way to write calls."""

    name: ToolFormatName
    trigger: str
    """Calls follow wherever this stands in the text."""
    is_whole_answer: bool = False
    """An answer that begins with ``{`` is a call too."""
    opening: str = ""
    """Before the first call."""
    call_opening: str = ""
    call_closing: str = ""
    separator: str
    closing: str = ""
    """After the last call."""
    arguments_key: str = "arguments"
    id_chars: int = 24
    """Length of the random part of an id; Mistral's templates want 9 characters and no prefix."""

    def head(self, name: str) -> str:
        """What stands before the arguments of a call."""
        return f'{{"name": "{name}", "{self.arguments_key}": '


FORMATS: dict[ToolFormatName, ToolFormat] = {
    "hermes": ToolFormat(
        name="hermes",
        trigger="<tool_call>",
        call_opening="<tool_call>\n",
        call_closing="\n</tool_call>",
        separator="\n",
    ),
    "llama3": ToolFormat(
        name="llama3",
        trigger="<|python_tag|>",
        is_whole_answer=True,
        separator="; ",
        arguments_key="parameters",
    ),
    "mistral": ToolFormat(
        name="mistral",
        trigger="[TOOL_CALLS]",
        opening="[TOOL_CALLS][",
        separator=", ",
        closing="]",
        id_chars=9,
    ),
}


def format_of_template(source: str) -> ToolFormat:
    """The format that a chat template shows its model; hermes where it shows none."""
    if "[TOOL_CALLS]" in source and "[ARGS]" not in source:
        return FORMATS["mistral"]
    if "<tool_call>" not in source and ("<|python_tag|>" in source or '"parameters": ' in source):
        return FORMATS["llama3"]
    return FORMATS["hermes"]


def tool_pieces(tokenizer: Tokenizer, tool_format: ToolFormat) -> Sequence[bytes]:
    """``tokenizer.pieces`` in which the trigger shows, also where it is a special token."""
    token_id = tokenizer.special_ids.get(tool_format.trigger)
    if token_id is None:
        return tokenizer.pieces
    pieces = list(tokenizer.pieces)
    pieces[token_id] = tool_format.trigger.encode()
    return pieces
