"""Skips that the summary of a run shows: what was not tested is a warning."""

from __future__ import annotations

import warnings
from typing import NoReturn

import pytest


def skip_loudly(what: str, reason: str) -> NoReturn:
    """Skip the test, and warn that ``what`` is not tested here."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # a warning, where all others are errors
        warnings.warn(f"{what} NOT TESTED here: {reason}", stacklevel=2)
    pytest.skip(reason)
