"""A command that was ended by a signal keeps its handlers until its process ends, so tests restore the former ones."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def usual_handlers() -> Iterator[None]:
    """Install the handlers that a process of its own has when a command begins."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    for number in NUMBERS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
