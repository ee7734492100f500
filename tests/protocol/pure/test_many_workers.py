"""The sender's work for one worker does not grow with the number of workers, and its results stay the same."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Iterator

import pytest
from fleet import functions_called
from msgspec.structs import replace

from weightsync.errors import ConfigurationError, RefusedError, StateError, WorkerLostError
from weightsync.protocol import by_worker, sender
from weightsync.protocol._tables import RefusalKind, State
from weightsync.protocol.by_worker import Tree, drop, put
from weightsync.protocol.messages import Ack, Bye, Hello, Refusal

FEW, MANY = 32, 1000


class Fleet:
    """A sender's state and data, with the given number of workers."""

    def __init__(self, workers: int) -> None:
        self.state, self.data = State.UNINITIALIZED, sender.SenderData()
        for worker in range(workers):
            self.take(sender.Join(worker, worker + 1))
        if workers:
            self.take(sender.Connect(7))

    def take(self, event: sender.Event) -> sender.Step:
        step = sender.step(self.state, self.data, event)
        self.state, self.data = step.to, step.data
        return step

    def acks(self) -> list[sender.Answer]:
        """An ack of each worker for the newest version."""
        ack = Ack(model_id="policy", incarnation=7, version=self.data.version)
        return [sender.Answer(worker, entry.link, ack) for worker, entry in self.data.workers.items()]


def calls_per_answer(workers: int) -> float:
    """Calls of Python functions for each answer."""
    fleet = Fleet(workers)
    fleet.take(sender.Send(None))
    acks = fleet.acks()

    calls = functions_called(lambda: [fleet.take(ack) for ack in acks])
    assert fleet.state is State.READY
    return len(calls) / workers


def bytes_per_answer(workers: int) -> float:
    """Bytes that the data after each answer needs, in addition to the data before: what the step copied.

    Garbage collection is off, so that no finalizer allocates.
    """
    fleet = Fleet(workers)
    fleet.take(sender.Send(None))
    acks = fleet.acks()
    fleet.take(acks.pop())  # the first answer to a send turns plain dicts of many workers into trees
    gc.disable()
    tracemalloc.start()
    try:
        held = [fleet.take(ack).data for ack in acks]
        return tracemalloc.get_traced_memory()[0] / len(held)
    finally:
        tracemalloc.stop()
        gc.enable()


def test_function_calls_per_answer_do_not_grow_with_the_number_of_workers() -> None:
    few, hundred, many = calls_per_answer(10), calls_per_answer(100), calls_per_answer(MANY)

    assert many <= 1.1 * hundred
    assert many <= few + 20  # an answer makes three changes, and each costs more in a tree than in a dict


def test_bytes_copied_per_answer_do_not_grow_with_the_number_of_workers() -> None:
    assert bytes_per_answer(MANY) <= 1.6 * bytes_per_answer(FEW)


def test_an_answer_leaves_the_previous_data_of_many_workers_unchanged() -> None:
    fleet = Fleet(MANY)
    fleet.take(sender.Send(None))
    acks = fleet.acks()
    states = [fleet.data, *(fleet.take(ack).data for ack in acks[:-1])]

    for answered, data in enumerate(states):
        assert data.outstanding is not None
        assert (len(data.outstanding.outcomes), len(data.outstanding.owed)) == (answered, MANY - answered)
        assert data.workers[answered].served == 0


def events(chance: random.Random, fleet: Fleet) -> Iterator[sender.Event]:
    """An endless stream of events of any worker; many of them are refused, stale or late."""
    links = 100
    yield sender.Connect(7)
    while True:
        worker, kind = chance.randrange(6), chance.choice(list(RefusalKind))
        entry, version = fleet.data.workers.get(worker), chance.choice([0, fleet.data.version])
        link = entry.link if entry is not None and chance.random() < 0.9 else 99
        ack = Ack(model_id="policy", incarnation=7, version=version)
        refusal = Refusal(model_id="policy", incarnation=7, version=version, kind=kind, fence=0, reason="no")
        links += 1
        bye, hello = Bye(model_id="policy", incarnation=7, reason=""), Hello(model_id="policy", incarnation=7)
        some = tuple(chance.sample(range(6), 2))
        yield chance.choice(
            [
                sender.Join(worker, links),
                sender.Join(worker, links),
                sender.Send(None),
                sender.SendAsync(some),
                sender.Wait(),
                sender.Abandon(),
                sender.Deadline(fleet.data.version),
                sender.LinkLost(worker, link, "broke"),
                sender.Remove(worker),
                *[sender.Answer(worker, link, message) for message in (ack, ack, ack, refusal, hello, bye)],
            ]
        )


def with_sorted_effects(step: sender.Step) -> sender.Step:
    """The step with its effects in one order: a tree has the order of the ids, a dict that of joining."""
    return replace(step, effects=tuple(sorted(step.effects, key=repr)))


@pytest.mark.parametrize("seed", range(3))
def test_steps_are_equal_whether_workers_are_kept_in_a_tree_or_a_dict(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is lowered to one worker, so that two workers are already kept in a tree in place of a dict."""
    plain, grown = Fleet(0), Fleet(0)
    refused, trees = 0, 0
    stream = events(random.Random(seed), plain)
    for _ in range(600):
        event, found = next(stream), []
        for fleet, small in ((plain, 1000), (grown, 1)):
            monkeypatch.setattr(by_worker, "SMALL", small)
            try:
                found.append(with_sorted_effects(fleet.take(event)))
            except (StateError, ConfigurationError, WorkerLostError, RefusedError) as error:
                found.append((type(error), str(error)))
        assert found[0] == found[1]
        refused += isinstance(found[0], tuple)
        trees += isinstance(grown.data.workers, Tree)
    assert 0 < refused < 500
    assert trees > 100


@pytest.mark.parametrize("ids", [range(3000), range(0, 3_000_000, 1024), [1 << bit for bit in range(60)]])
def test_a_tree_of_workers_equals_a_dict_after_random_puts_and_drops(ids: range | list[int]) -> None:
    chance, model, tree = random.Random(1), {}, Tree({}, 0)
    ids = list(ids)
    for value in range(4000):
        worker = chance.choice(ids)
        if worker in model and chance.random() < 0.3:
            del model[worker]
            tree = drop(tree, worker)
        else:
            model[worker] = value
            tree = put(tree, worker, value)
        assert (tree.get(worker), len(tree)) == (model.get(worker), len(model))
    assert dict(tree.items()) == tree == model
    assert [*tree] == sorted(model)
    assert [*tree.values()] == [model[worker] for worker in sorted(model)]
    with pytest.raises(KeyError):
        drop(tree, max(ids) + 1)


@pytest.mark.parametrize("size", [by_worker.SMALL - 1, by_worker.SMALL, by_worker.SMALL + 1])
def test_put_and_drop_leave_the_given_mapping_unchanged(size: int) -> None:
    given = {worker: worker for worker in range(size)}
    before = dict(given)

    more, less = put(given, size, -1), drop(given, 0)

    assert given == before
    assert more == before | {size: -1}
    assert less == {worker: worker for worker in range(1, size)}
    assert type(more) is (dict if size < by_worker.SMALL else Tree)
