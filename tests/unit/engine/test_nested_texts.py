"""A foreign text that is quoted in a message of weightsync ends with one mark, as a sentence does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fleet import PATIENCE, Pair

from weightsync import MultiProcessWeightSyncScheme, TransportError, WorkerLostError
from weightsync.errors import sentence


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("it crashed", "it crashed."),
        ("it crashed.", "it crashed."),
        ("crash?", "crash?"),
        ("crash!", "crash!"),
        ("the cause:", "the cause."),
        ("loading...", "loading."),
        ("two lines\n", "two lines."),
        ("KeyError: 'why?'", "KeyError: 'why?'."),
    ],
)
def test_a_quoted_text_ends_with_one_punctuation_mark(text: str, expected: str) -> None:
    assert sentence(text) == expected


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(MultiProcessWeightSyncScheme)
    yield made
    made.close()


def test_an_error_of_the_trainer_is_quoted_with_one_punctuation_mark(pair: Pair) -> None:
    pair.sync()
    pair.sender.fail(ValueError("crash?"))

    with pytest.raises(TransportError, match=r"ValueError: crash\? It keeps version 1\. To receive"):
        pair.receiver.receive(PATIENCE)


@pytest.mark.parametrize(("said", "shown"), [("crash?", r"crash\?"), ("crash:", r"crash\.")])
def test_an_error_of_a_worker_is_quoted_with_one_punctuation_mark(said: str, shown: str, pair: Pair) -> None:
    pair.receiver.fail(ValueError(said))

    with pytest.raises(WorkerLostError, match=rf"ValueError: {shown} add_worker\(\) brings one back"):
        pair.sender.await_workers(PATIENCE)
