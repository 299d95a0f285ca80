"""Log records with the ids of the request they concern, in both forms."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from mesh.service import setup_logging
from mesh.telemetry.log_format import about


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield logging.getLogger("x")
    root.handlers[:] = handlers
    root.setLevel(level)


def test_json_is_one_object_a_line(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging("info", "decode-0", "json")
    logger.info('two\nlines "%s"', "é", extra=about("r-0", transfer_id="t"))
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        logger.exception("failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first["msg"] == 'two\nlines "é"'
    assert (first["request_id"], first["transfer_id"]) == ("r-0", "t")
    assert (first["proc"], first["level"], first["logger"]) == ("decode-0", "INFO", "x")
    assert first["time"].endswith("Z")
    assert "request_id" not in second
    assert "RuntimeError: boom" in second["error"]


def test_text_names_the_request(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", "decode-0")
    logger.info("leg failed", extra=about("r-0", transfer_id="", code="overloaded"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("msg=leg failed request_id=r-0 code=overloaded")
