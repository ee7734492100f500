"""Walks written by hand: to rows that random walks seldom take, and to bugs that random walks have found."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from guarantees import check_all
from local_links import Side
from world import ROWS, LinkPair, Trainer, Worker, World

from weightsync.errors import ProtocolError, StateError, SyncError, TransportError
from weightsync.protocol import messages
from weightsync.protocol._tables import Delivery, ReceiverInput, SenderInput, State
from weightsync.transports.base import Payloads
from weightsync.weights.target import Mode

Make = Callable[[Delivery], World]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    return lambda delivery: World(delivery, Payloads.INLINE, Mode.COPY, monkeypatch)


@pytest.fixture
def world(make: Make) -> World:
    """A world in which worker 0 has completed the handshake with the sender."""
    return greeted(make(Delivery.ORDERED))


def greeted(world: World) -> World:
    world.add(world.trainers[0], 0)
    world.connect(world.trainers[0])
    world.deliver_all()
    world.receive(world.workers[0])
    return world


def trainer(world: World) -> Trainer:
    return world.trainers[0]


def worker(world: World) -> Worker:
    return world.workers[0]


def newest(world: World) -> LinkPair:
    return world.link_pairs[-1]


def deliver(world: World, kind: type[messages.Message], version: int = 0) -> None:
    """Deliver the newest message of this kind, and of this version if one is given."""
    for link_pair in reversed(world.link_pairs):
        for parcel in reversed(link_pair.deliverable()):
            message = parcel.received.message
            if isinstance(message, kind) and version in (0, getattr(message, "version", 0)):
                world.deliver(link_pair, parcel)
                return
    pytest.fail(f"no {kind.__name__} of version {version} is in transit")


def taken(world: World, state: State, step: SenderInput | ReceiverInput, action: Callable[[], object]) -> None:
    """Perform an action, and require that it takes this row, that the model agrees and that the guarantees hold."""
    before = ROWS[state, step]
    action()
    world.compare()
    check_all(world)
    assert ROWS[state, step] > before


def send_versions(world: World, versions: int = 1) -> None:
    """Send versions, of which nothing has arrived yet."""
    for _ in range(versions):
        world.send(trainer(world), on_pending="supersede")


def half_answered(world: World) -> None:
    """Let the worker decide on an update while its answer cannot leave."""
    world.clog(newest(world), True)
    send_versions(world)
    world.deliver_all()
    world.receive(worker(world))
    assert worker(world).real.state is State.AWAITING_ACK


def pending(world: World) -> None:
    """Let a version arrive that is not applied yet."""
    send_versions(world)
    world.deliver_all()
    world.receive(worker(world), held=True)
    assert worker(world).real.state is State.PENDING_ASYNC


def connect_newer_copy(world: World) -> Trainer:
    """Connect a copy of the sender to the worker, with a higher incarnation."""
    world.clock.ns += 1000
    world.copy_trainer(trainer(world), "pickle")
    copied = world.trainers[-1]
    world.add(copied, 0)
    world.connect(copied)
    return copied


def connect_older_copy(world: World) -> Trainer:
    """Connect a copy of the sender to the worker, with a lower incarnation."""
    world.clock.ns -= 1000
    copied = connect_copy(world)
    world.clock.ns += 1000
    return copied


def connect_copy(world: World) -> Trainer:
    world.copy_trainer(trainer(world), "deepcopy")
    copied = world.trainers[-1]
    world.add(copied, 0)
    world.connect(copied)
    return copied


def receive(world: World, held: bool = False) -> Callable[[], object]:
    return lambda: world.receive(worker(world), held)


SETUP_OF_STATE: dict[State, Callable[[World], None]] = {
    State.READY: lambda world: None,
    State.PENDING_ASYNC: pending,
    State.AWAITING_ACK: half_answered,
}


# ------------------------------------------------------------------------------------------ before CONNECT


def test_join_remove_and_close_are_allowed_before_connect(make: Make) -> None:
    world = make(Delivery.ORDERED)
    taken(world, State.UNINITIALIZED, SenderInput.JOIN, lambda: world.add(trainer(world), 0))
    taken(world, State.UNINITIALIZED, SenderInput.REMOVE, lambda: world.remove(trainer(world), 0))
    taken(world, State.UNINITIALIZED, SenderInput.CLOSE, lambda: world.close(trainer(world)))
    taken(world, State.CLOSED, SenderInput.CLOSE, lambda: world.close(trainer(world)))


@pytest.mark.parametrize("again", ["add", "remove"])
def test_a_link_replaced_or_removed_before_connect_is_closed(make: Make, again: str) -> None:
    world = make(Delivery.ORDERED)
    world.add(trainer(world), 0)
    first = newest(world)
    if again == "add":
        world.add(trainer(world), 0)
    else:
        world.remove(trainer(world), 0)

    assert first.ends["first"] not in trainer(world).real._driver.links()
    with pytest.raises(TransportError):
        first.ends["first"].receive()


# -------------------------------------------------------------------------------------------------- receivers


@pytest.mark.parametrize("state", SETUP_OF_STATE)
def test_weights_applied_by_hand_are_served_as_no_version(world: World, state: State) -> None:
    send_versions(world)
    world.deliver_all()
    world.receive(worker(world))
    SETUP_OF_STATE[state](world)
    applied = world.fresh(fits=True)
    taken(world, state, ReceiverInput.INVALIDATED, lambda: world.apply_by_hand(worker(world), applied))
    assert worker(world).real.version is None


def test_a_version_that_was_written_over_by_hand_is_applied_again_over_a_new_link(world: World) -> None:
    send_versions(world)
    world.deliver_all()
    world.receive(worker(world))
    world.apply_by_hand(worker(world), world.fresh(fits=True))
    world.add(trainer(world), 0)
    for _ in ("the handshake", "the version"):
        world.deliver_all()
        world.receive(worker(world))
        world.compare()
        check_all(world)
    assert worker(world).real.version == 1


@pytest.mark.parametrize("state", SETUP_OF_STATE)
def test_a_newer_sender_takes_over(world: World, state: State) -> None:
    SETUP_OF_STATE[state](world)
    connect_newer_copy(world)
    deliver(world, messages.Hello)
    taken(world, state, ReceiverInput.TAKEOVER, receive(world, held=True))
    assert worker(world).real.state is State.READY


@pytest.mark.parametrize("state", SETUP_OF_STATE)
def test_an_older_sender_is_rejected(world: World, state: State) -> None:
    SETUP_OF_STATE[state](world)
    connect_older_copy(world)
    deliver(world, messages.Hello)
    taken(world, state, ReceiverInput.REJECTED, receive(world, held=True))


@pytest.mark.parametrize("state", SETUP_OF_STATE)
def test_a_receiver_can_be_closed_twice_and_then_refuses_calls(world: World, state: State) -> None:
    SETUP_OF_STATE[state](world)
    taken(world, state, ReceiverInput.CLOSE, lambda: world.close_worker(worker(world)))
    taken(world, State.CLOSED, ReceiverInput.CLOSE, lambda: world.close_worker(worker(world)))
    assert isinstance(world.receive(worker(world)), StateError)
    assert isinstance(world.apply_by_hand(worker(world), world.fresh()), StateError)


@pytest.mark.parametrize("state", SETUP_OF_STATE)
def test_a_receiver_loses_its_link(world: World, state: State) -> None:
    SETUP_OF_STATE[state](world)
    world.cut(newest(world))
    taken(world, state, ReceiverInput.LINK_DOWN, receive(world, held=True))


def test_an_answer_that_cannot_be_written_takes_the_link_down(world: World) -> None:
    send_versions(world)
    world.deliver_all()
    world.cut(newest(world))
    taken(world, State.AWAITING_ACK, ReceiverInput.LINK_DOWN, receive(world))
    assert worker(world).real.version == 1


def test_nothing_more_is_read_from_a_link_whose_answer_could_not_be_written(world: World) -> None:
    half_answered(world)
    send_versions(world)
    world.deliver_all()
    world.cut(newest(world))
    assert isinstance(world.receive(worker(world)), TransportError)


def test_no_message_is_read_after_a_goodbye(make: Make) -> None:
    world = greeted(make(Delivery.REORDERED))
    send_versions(world)
    network = newest(world).network
    update = next(parcel for parcel in network.in_flight if parcel.to is Side.SECOND)
    world.deliver(newest(world), update)
    world.close(trainer(world))
    found = world.receive(worker(world))
    assert not isinstance(found, ProtocolError)


@pytest.mark.parametrize("held", [True, False])
def test_an_update_that_arrives_after_a_newer_one_is_stale(make: Make, held: bool) -> None:
    world = greeted(make(Delivery.REORDERED))
    send_versions(world, 2)
    deliver(world, messages.Update, 2)
    world.receive(worker(world), held)
    deliver(world, messages.Update, 1)
    state = State.PENDING_ASYNC if held else State.READY
    taken(world, state, ReceiverInput.STALE, receive(world, held))


@pytest.mark.parametrize("held", [True, False])
def test_a_duplicate_update_is_applied_once(make: Make, held: bool) -> None:
    world = greeted(make(Delivery.AT_LEAST_ONCE))
    send_versions(world)
    link_pair = newest(world)
    (update,) = [parcel for parcel in link_pair.network.in_flight if parcel.to is Side.SECOND]
    world.duplicate(link_pair, update)
    world.deliver(link_pair, update)
    world.receive(worker(world), held)
    deliver(world, messages.Update)
    state = State.PENDING_ASYNC if held else State.READY
    taken(world, state, ReceiverInput.DUPLICATE, receive(world, held))


def test_a_swap_that_breaks_closes_all_links_and_serves_no_version(world: World) -> None:
    world.set_mood(worker(world), "breaks")
    world.add(trainer(world), 0)
    world.deliver_all()
    world.receive(worker(world))
    world.add(trainer(world), 1)
    pending(world)
    taken(world, State.PENDING_ASYNC, ReceiverInput.BROKEN, receive(world))
    assert worker(world).real.version is None
    assert worker(world).real._driver.links() == []


def test_the_pending_update_is_dropped_with_its_link(world: World) -> None:
    pending(world)
    arrived = worker(world).model.arrived
    assert arrived is not None
    world.cut(newest(world))
    world.apply_by_hand(worker(world), arrived)
    assert worker(world).real.version is None
    assert worker(world).real.state is State.UNINITIALIZED


def test_weights_applied_by_hand_whose_swap_breaks_leave_no_served_version(world: World) -> None:
    send_versions(world)
    world.deliver_all()
    world.receive(worker(world))
    assert worker(world).real.version == 1
    world.set_mood(worker(world), "breaks")
    world.apply_by_hand(worker(world), world.fresh())
    assert worker(world).real.version is None


def test_serving_during_a_swap_gets_the_version_of_the_new_weights(world: World) -> None:
    """A `serving()` that waits in another thread while weights are swapped gets the version of the new weights."""
    seen: list[tuple[int | None, int]] = []
    real, policy = worker(world).real, worker(world).policy

    def reader() -> None:
        with real.serving() as version:
            seen.append((version, policy.extra))

    shipped, thread = real.target().swap, threading.Thread(target=reader)

    def swap(staged: object) -> None:
        shipped(staged)
        thread.start()

    real.target().swap = swap  # type: ignore[method-assign]
    send_versions(world)
    world.deliver_all()
    world.receive(worker(world))
    thread.join()
    assert seen == [(1, policy.extra)]


# ---------------------------------------------------------------------------------------------------- senders


def test_a_rejoining_worker_that_serves_the_version_due_has_caught_up(world: World) -> None:
    send_versions(world)
    world.deliver_all()
    world.receive(worker(world))
    world.deliver_all()
    world.wait(trainer(world))
    world.add(trainer(world), 0)
    world.deliver_all()
    world.receive(worker(world))
    world.deliver_all()
    taken(world, State.READY, SenderInput.CAUGHT_UP, lambda: world.poll(trainer(world)))
    assert trainer(world).real.workers[0].served == 1
    assert trainer(world).real.stale_answers == 0


def during(world: World, *script: Callable[[], object]) -> object:
    """Wait without a timeout for the outstanding update while the script happens, then be interrupted."""
    world.during_the_wait([lambda each=each: each() and None for each in script], "interrupt")
    return world.wait(trainer(world), timeout=None)


def test_joins_losses_and_removals_are_handled_while_a_caller_waits(world: World) -> None:
    sender = trainer(world)
    world.add(sender, 1)
    send_versions(world)
    world.deliver_all()
    world.receive(worker(world))
    world.abandon(sender)
    world.deliver_all()  # the ack of the first update, which is no longer owed
    world.add(sender, 2)  # it catches up with the first update
    send_versions(world)
    world.poll(sender)
    for state, step, action in (
        (State.AWAITING_ACK, SenderInput.ARRIVED, lambda: (world.deliver_all(), world.receive(world.workers[2]))),
        (State.AWAITING_ACK, SenderInput.JOIN, lambda: world.add(sender, 2)),
        (State.AWAITING_ACK, SenderInput.LOST, lambda: world.add(sender, 2)),
        (State.AWAITING_ACK, SenderInput.REMOVE, lambda: world.remove(sender, 2)),
    ):
        taken(world, state, step, lambda action=action: during(world, action, world.deliver_all))


def test_an_ack_of_an_abandoned_update_is_stale_while_a_caller_waits(world: World) -> None:
    sender = trainer(world)
    send_versions(world)
    world.deliver_all()
    world.receive(worker(world))
    send_versions(world)
    taken(world, State.AWAITING_ACK, SenderInput.STALE, lambda: during(world, world.deliver_all))
    assert sender.real.state is State.PENDING_ASYNC


def test_a_joiner_catches_up_while_a_caller_waits(world: World) -> None:
    sender = trainer(world)
    send_versions(world)
    world.add(sender, 1)
    script = (world.deliver_all, lambda: world.receive(world.workers[1]), world.deliver_all)
    taken(world, State.AWAITING_ACK, SenderInput.CAUGHT_UP, lambda: during(world, *script))


def test_a_close_by_another_thread_ends_a_wait_with_an_abandoned_outcome(world: World) -> None:
    send_versions(world)
    found = None

    def close_and_see() -> None:
        nonlocal found
        found = during(world, lambda: world.close(trainer(world)))

    taken(world, State.AWAITING_ACK, SenderInput.CLOSE, close_and_see)
    assert isinstance(found, SyncError)
    assert [outcome.kind.name for outcome in found.report.outcomes.values()] == ["ABANDONED"]


def test_updates_are_still_sent_over_a_lossy_link_after_several_were_lost(make: Make) -> None:
    world = greeted(make(Delivery.BEST_EFFORT))
    for _ in range(4):
        send_versions(world)
        link_pair = newest(world)
        for parcel in link_pair.network.in_flight:
            world.drop(link_pair, parcel)
    send_versions(world)
    world.deliver_all()
    assert world.receive(worker(world)) is True
    assert worker(world).real.version == 5


def test_a_version_that_overtakes_an_older_one_is_applied(make: Make) -> None:
    world = greeted(make(Delivery.REORDERED))
    send_versions(world, 2)
    deliver(world, messages.Update, 2)
    assert world.receive(worker(world)) is True
    assert worker(world).real.version == 2
