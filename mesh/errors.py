"""The error tree of the whole project.

Every error carries a stable ``code``: it is the metric label, the log field and the ``code`` of the
HTTP error body. ``http_status`` is what the gateway answers when the error reaches a client before
the first byte was sent.

    PdmeshError
    ├── InvalidRequest        400  the client sent something wrong (``param`` names the field)
    │   ├── ModelNotFound     404
    │   ├── ContextTooLong    400
    │   └── GrammarFailed     400  the output grammar is wrong, or takes too much to follow
    ├── Overloaded            429  no capacity now, try again (``retry_after_s``)
    ├── Unavailable           503  no worker can serve this
    ├── DeadlineExceeded      504
    ├── WorkerLost            503  the worker died or froze; the gateway retries
    ├── TransferFailed        503  KV did not arrive whole; the gateway retries
    ├── ProtocolError         500  a peer sent bytes we do not accept
    │   ├── IncompatiblePeer  two workers that can't exchange KV; the gateway pairs others
    │   │   └── VersionMismatch
    │   └── MessageTooLarge
    ├── ConfigError                a flag, file or environment value is wrong
    └── IllegalTransition          a state machine was driven wrongly: a bug of ours, never a peer's
"""


class PdmeshError(Exception):
    """Root of the tree; ``str(error)`` is safe to show to a client."""

    code: str = "internal_error"
    http_status: int = 500
    retryable: bool = False


class InvalidRequest(PdmeshError):
    """The client's request is wrong; ``param`` names the field at fault where there is one."""

    code = "invalid_request"
    http_status = 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelNotFound(InvalidRequest):
    """The ``model`` field names something this cluster does not serve."""

    code = "model_not_found"
    http_status = 404


class ContextTooLong(InvalidRequest):
    """Prompt plus requested output do not fit the context or the KV pool."""

    code = "context_length_exceeded"


class GrammarFailed(InvalidRequest):
    """The grammar of the output is not valid, or following it goes over a limit."""

    code = "grammar_failed"


class Overloaded(PdmeshError):
    """No capacity at the moment; the client may try again after ``retry_after_s`` seconds."""

    code = "overloaded"
    http_status = 429
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(PdmeshError):
    """No worker that could serve this request is known."""

    code = "unavailable"
    http_status = 503
    retryable = True


class DeadlineExceeded(PdmeshError):
    """The request's deadline passed before it finished."""

    code = "deadline_exceeded"
    http_status = 504


class WorkerLost(PdmeshError):
    """A worker died, froze or restarted while it held a part of the request."""

    code = "worker_lost"
    http_status = 503
    retryable = True


class TransferFailed(PdmeshError):
    """KV blocks did not arrive whole and verified."""

    code = "transfer_failed"
    http_status = 503
    retryable = True


class ProtocolError(PdmeshError):
    """A peer sent bytes that are not an acceptable message."""

    code = "protocol_error"


class IncompatiblePeer(ProtocolError):
    """Two workers can't exchange KV: layout or data plane differ. Other pairs may."""

    code = "incompatible_peer"
    http_status = 503
    retryable = True


class VersionMismatch(IncompatiblePeer):
    """A peer speaks another protocol version."""

    code = "version_mismatch"


class MessageTooLarge(ProtocolError):
    """A message is over its size cap."""

    code = "message_too_large"


class ConfigError(PdmeshError):
    """A flag, file or environment value is wrong; the message names it."""

    code = "config_error"


class IllegalTransition(PdmeshError):
    """An event that the transition table does not allow in this state."""

    code = "illegal_transition"
