"""What the APIs for agents share: one answer in parts, errors that name the client's fields."""

from __future__ import annotations

from typing import Any

from gateway.endpoint import Endpoint
from gateway.generation.answer import Answer
from gateway.generation.choice import Delta
from gateway.generation.parts import AnswerParts, Part
from gateway.prompts.conversation import FieldNames
from gateway.request.schema import ChatRequest
from gateway.server_state import ServerState
from mesh.errors import InvalidRequest


class AgentEndpoint(Endpoint[ChatRequest]):
    """A chat request in another API's form; ``decode`` sets ``names``."""

    names: FieldNames

    def whole(
        self,
        server: ServerState,
        request: ChatRequest,
        answer: Answer,
        deltas: list[list[Delta]],
    ) -> dict[str, Any]:
        """See ``Endpoint``."""
        parts = AnswerParts()
        for delta in deltas[0]:
            parts.add(delta)
        return self.body(server, answer, parts.parts)

    def body(self, server: ServerState, answer: Answer, parts: list[Part]) -> dict[str, Any]:
        """The whole answer as the client gets it."""
        raise NotImplementedError

    def rename(self, error: InvalidRequest) -> None:
        """See ``Endpoint``."""
        self.names.rename(error)
