"""An error as Anthropic's API writes it."""

from __future__ import annotations

from typing import Any

from mesh.errors import InvalidRequest, PdmeshError

_TYPES = {
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


def error_body(error: PdmeshError) -> dict[str, Any]:
    """Anthropic's error object: it has no field for the parameter, so the message names it."""
    default = "invalid_request_error" if error.http_status < 500 else "api_error"
    message = str(error)
    param = error.param if isinstance(error, InvalidRequest) else None
    if param is not None and param not in message:
        message = f"{param}: {message}"
    kind = _TYPES.get(error.http_status, default)
    return {"type": "error", "error": {"type": kind, "message": message}}
