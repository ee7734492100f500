"""`weightsync.group.stack_dump`: reading the stacks that a worker process writes on a signal."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from weightsync.group import stack_dump
from weightsync.group.stack_dump import StackDump, request

HEAD = [b"Stack (most recent call first):\n", b'  File "/app/train.py"', b", line 7 in ", b"rollout\n"]
LAST = [b'  File "<string>", line 1 in ', b"<module>\n"]


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[bytes]], StackDump]:
    """A function that requests a dump from a process which writes these pieces, each once the last one was read."""
    monkeypatch.setattr(stack_dump, "_PATIENCE", 60.0)

    def answer(pieces: Sequence[bytes]) -> StackDump:
        ours, theirs = Pipe(duplex=False)
        with ours, _on_signal(lambda: _write(theirs, ours, pieces)):
            return request(os.getpid(), ours)

    return answer


@contextmanager
def _on_signal(write: Callable[[], None]) -> Iterator[None]:
    """Let this process stand in for the worker, and call ``write`` on the signal."""
    thread = threading.Thread(target=write)
    before = signal.signal(stack_dump._ASKED, lambda *_: thread.start())
    try:
        yield
    finally:
        signal.signal(stack_dump._ASKED, before)
        thread.join()


def _write(theirs: Connection, ours: Connection, pieces: Sequence[bytes]) -> None:
    with theirs:
        for piece in pieces:
            os.write(theirs.fileno(), piece)
            while select.select([ours], [], [], 0.0)[0]:
                pass


@pytest.mark.parametrize("last", [LAST, [b"  ...\n"]], ids=["to the outermost frame", "cut after 100 frames"])
def test_a_stack_that_arrives_in_pieces_is_read_to_its_end(
    answering: Callable[[Sequence[bytes]], StackDump], last: list[bytes]
) -> None:
    dump = answering(HEAD + last)
    assert dump.place == "it was at line 7 of /app/train.py, in rollout"
    assert dump.stack == b"".join(HEAD + last).decode().strip()


def test_the_partial_stack_of_a_process_that_dies_while_writing_is_reported(
    answering: Callable[[Sequence[bytes]], StackDump],
) -> None:
    assert answering(HEAD).place == "it was at line 7 of /app/train.py, in rollout"
    assert answering(HEAD[:1]) == StackDump()


def test_the_rest_of_a_stack_that_never_comes_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_dump, "_PATIENCE", 0.01)
    ours, theirs = Pipe(duplex=False)
    with ours, theirs, _on_signal(lambda: None):
        os.write(theirs.fileno(), b"".join(HEAD))
        assert request(os.getpid(), ours).stack == b"".join(HEAD).decode().strip()


def test_the_place_is_the_innermost_line_that_is_not_the_packages() -> None:
    ours = f'  File "{stack_dump._PACKAGE_FOLDER}group/channel.py", line 5 in put\n'
    theirs = '  File "/app/train.py", line 7 in rollout\n'
    for stack, place in (
        (ours + theirs, "line 7 of /app/train.py, in rollout"),
        (ours, f"line 5 of {stack_dump._PACKAGE_FOLDER}group/channel.py, in put"),
    ):
        assert stack_dump._parse_dump(stack).place == f"it was at {place}"


def test_of_a_process_that_dies_as_it_is_asked_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(*_: int) -> None:
        raise ProcessLookupError

    ours, theirs = Pipe(duplex=False)
    with ours, theirs, monkeypatch.context() as patched:
        patched.setattr(stack_dump, "_catches_signal", lambda _: True)
        patched.setattr(os, "kill", kill)
        assert request(os.getpid(), ours) == StackDump()
