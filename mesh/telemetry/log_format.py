"""The two forms of a log record: ``key=value`` for people, JSON for programs; one line each.

A record that concerns a request names it in ``extra``, made by ``about``: the same keys in every
process, so that one search finds a request's records wherever they were written.
"""

from __future__ import annotations

import json
import logging
import time

LOG_KEYS = ("request_id", "transfer_id", "client_request_id", "worker_id", "code")
"""What a record may carry beside its message."""

_TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"


def about(request_id: str = "", **more: str) -> dict[str, str]:
    """``extra`` of a record; keys are those of ``LOG_KEYS``, empty values are left out."""
    return {key: value for key, value in {"request_id": request_id, **more}.items() if value}


class TextFormatter(logging.Formatter):
    """``time level process logger message`` as key=value, one line whatever the message holds."""

    converter = staticmethod(time.gmtime)

    def __init__(self, name: str) -> None:
        super().__init__(
            f"time=%(asctime)s.%(msecs)03dZ level=%(levelname)s proc={name} pid=%(process)d "
            "logger=%(name)s msg=%(message)s",
            datefmt=_TIME_FORMAT,
        )

    def formatMessage(self, record: logging.LogRecord) -> str:
        named = "".join(f" {key}={value}" for key, value in _named(record).items())
        return super().formatMessage(record) + named

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\r", "\\r").replace("\n", "\\n")


class JsonFormatter(logging.Formatter):
    """The same fields as an object, with ``error`` for a traceback."""

    converter = staticmethod(time.gmtime)

    def __init__(self, name: str) -> None:
        super().__init__(datefmt=_TIME_FORMAT)
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, str | int] = {
            "time": f"{self.formatTime(record, _TIME_FORMAT)}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "proc": self._name,
            "pid": record.process or 0,
            "logger": record.name,
            "msg": record.getMessage(),
            **_named(record),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def _named(record: logging.LogRecord) -> dict[str, str]:
    given = record.__dict__
    return {key: str(given[key]) for key in LOG_KEYS if key in given}
