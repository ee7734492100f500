"""The required answer of a machine to each event, written from spec/README.md and not from the code.

An event is taken, late, or refused with an error. Values are those of the shipped halves; the rows are those of
`weightsync.protocol._tables`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations, product

from modelcheck.second import Bounds
from network import number

from weightsync.errors import ConfigurationError, ProtocolError, RefusedError, StateError, WorkerLostError
from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending
from weightsync.protocol._tables import RECEIVER_ROWS, SENDER_ROWS, ReceiverInput, RefusalKind, SenderInput, State
from weightsync.protocol.messages import Ack, Bye, Hello, Refusal

MODEL = "policy"
#: The required answer: an error type if the event is refused, None if it is late, else the input by which it is taken.
Due = type[Exception] | SenderInput | ReceiverInput | None

_S, _R = SenderInput, ReceiverInput
_OWN_CALLS = {
    sending.Connect: _S.CONNECT,
    sending.Send: _S.SEND,
    sending.SendAsync: _S.SEND_ASYNC,
    sending.Abandon: _S.ABANDON,
    sending.Join: _S.JOIN,
    sending.Remove: _S.REMOVE,
    sending.Close: _S.CLOSE,
}
_OWN_RESULTS = {
    receiving.Applied: _R.APPLIED,
    receiving.Defer: _R.DEFERRED,
    receiving.Refused: _R.REFUSED,
    receiving.Broken: _R.BROKEN,
    receiving.Invalidate: _R.INVALIDATED,
    receiving.Answered: _R.ANSWERED,
    receiving.Close: _R.CLOSE,
    receiving.Fail: _R.CLOSE,
}


def sender_events(bounds: Bounds) -> list[sending.Event]:
    """Every call and every message, with one worker, link and version more than the bounds have.

    So there are events that no correct network delivers.
    """
    workers = range(1, bounds.workers + 2)
    links, versions = range(1, bounds.max_link + 2), range(bounds.max_version + 2)
    targets = [None, *chain.from_iterable(combinations(workers, size) for size in range(len(workers) + 1))]
    return [
        sending.Connect(1),
        sending.Wait(),
        sending.Abandon(),
        sending.Close(),
        *map(sending.Send, targets),
        *map(sending.SendAsync, targets),
        *map(sending.Deadline, versions),
        *map(sending.Interrupted, versions),
        *(sending.Join(w, k) for w, k in product(workers, links)),
        *map(sending.Remove, workers),
        *(sending.LinkLost(w, k, "") for w, k in product(workers, links)),
        *(sending.Answer(w, k, m) for w, k, m in product(workers, links, _messages(bounds, versions))),
    ]


def _messages(bounds: Bounds, versions: range) -> Iterator[Hello | Ack | Refusal | Bye]:
    for incarnation in range(1, bounds.max_clock + bounds.senders + 1):
        yield Hello(model_id=MODEL, incarnation=incarnation)
        yield Bye(model_id=MODEL, incarnation=incarnation)
        for version in versions:
            yield Ack(model_id=MODEL, incarnation=incarnation, version=version)
            for kind, fence in product(RefusalKind, (0, incarnation + 1)):
                yield Refusal(model_id=MODEL, incarnation=incarnation, version=version, kind=kind, fence=fence)


def receiver_events(bounds: Bounds) -> list[receiving.Event]:
    """Every result and every message, including those that no correct network delivers."""
    links = [number(bounds, s, k) for s, k in product(bounds.all_senders, range(1, bounds.max_link + 2))]
    incarnations = range(1, bounds.max_clock + bounds.senders + 2)
    versions = range(1, bounds.max_version + 2)
    numbers = range(bounds.max_link + 1)
    refusal = Refusal(model_id=MODEL, incarnation=1, version=1, kind=RefusalKind.REFUSED, fence=1)
    return [
        receiving.Applied(Ack(model_id=MODEL, incarnation=1, version=1)),
        receiving.Defer(Ack(model_id=MODEL, incarnation=1, version=1)),
        receiving.SendAck(),
        receiving.Refused(refusal),
        receiving.Broken(),
        receiving.Invalidate(),
        receiving.Answered(),
        receiving.Close(),
        receiving.Fail("an exception"),
        *map(receiving.LinkDown, links),
        *(receiving.Goodbye(k, i) for k, i in product(links, incarnations)),
        *(receiving.LinkDown(k, "no memory") for k in links),
        *(receiving.HelloArrived(*of) for of in product(links, incarnations, ("", "another"), numbers)),
        *(receiving.UpdateArrived(k, i, v) for k, i, v in product(links, incarnations, versions)),
    ]


def required_answer_of_sender(state: State, data: sending.SenderData, event: sending.Event) -> Due:
    """The required answer of a sender to an event."""
    taken = _sender_input(state, data, event)
    if taken is None:
        return None
    if (state, taken) not in SENDER_ROWS:
        return StateError
    if isinstance(event, sending.Send | sending.SendAsync):
        return _dispatching(data, event.targets) or taken
    if isinstance(event, sending.Remove) and event.worker not in data.workers:
        return ConfigurationError
    return taken


def _dispatching(data: sending.SenderData, targets: tuple[int, ...] | None) -> type[Exception] | None:
    chosen = list(data.workers) if targets is None else targets
    if not chosen or not set(chosen) <= set(data.workers):
        return ConfigurationError
    link_states = {data.workers[worker].link_state for worker in chosen}
    if link_states & {sending.LinkState.EXPECTED, sending.LinkState.UP}:
        return None
    return RefusedError if link_states == {sending.LinkState.REFUSED} else WorkerLostError


def _sender_input(state: State, data: sending.SenderData, event: sending.Event) -> SenderInput | None:
    owed = {} if data.outstanding is None else dict(data.outstanding.owed)
    match event:
        case sending.Wait():
            return _S.WAIT if owed or data.outstanding is None else _S.WAIT_SETTLED
        case sending.Deadline(version) | sending.Interrupted(version):
            if state is not State.AWAITING_ACK or data.version != version:
                return None
            return _S.DEADLINE if isinstance(event, sending.Deadline) else _S.INTERRUPTED
        case sending.LinkLost(worker, link, _):
            stands = state not in (State.UNINITIALIZED, State.CLOSED) and _stands(data, worker, link)
            return _ending(state, owed, worker, link, _S.LOST) if stands else None
        case sending.Answer():
            return None if state is State.CLOSED else _answered(state, data, owed, event)
        case _:
            return _OWN_CALLS[type(event)]


def _stands(data: sending.SenderData, worker: int, link: int) -> bool:
    entry = data.workers.get(worker)
    ended = (sending.LinkState.LOST, sending.LinkState.REFUSED)
    return entry is not None and entry.link == link and entry.link_state not in ended


def _ending(state: State, owed: dict[int, int], worker: int, link: int, otherwise: SenderInput) -> SenderInput:
    return _S.SETTLED if state is State.AWAITING_ACK and owed == {worker: link} else otherwise


def _answered(state: State, data: sending.SenderData, owed: dict[int, int], event: sending.Answer) -> SenderInput:
    worker, link, message = event.worker, event.link, event.message
    if message.incarnation != data.incarnation or not _stands(data, worker, link):
        return _S.STALE
    entry = data.workers[worker]
    if isinstance(message, Hello):
        return _S.ARRIVED if entry.link_state is sending.LinkState.EXPECTED else _S.STALE
    if isinstance(message, Bye):
        return _ending(state, owed, worker, link, _S.LEFT)
    if isinstance(message, Refusal) and (message.version == 0 or message.fence > message.incarnation):
        return _ending(state, owed, worker, link, _S.LOST)
    if owed.get(worker) == link and message.version == data.version:
        return _ending(state, owed, worker, link, _S.REPLY)
    return _S.CAUGHT_UP if message.version and message.version == entry.catching else _S.STALE


def required_answer_of_receiver(state: State, data: receiving.ReceiverData, event: receiving.Event) -> Due:
    """The required answer of a receiver to an event."""
    match event:
        case receiving.LinkDown(link):
            if state is State.CLOSED or data.link not in (link, None):
                return None
            taken = _R.LINK_DOWN
        case receiving.Goodbye(link, incarnation):
            if state is State.CLOSED or (data.link is not None and (link, incarnation) != (data.link, data.fence)):
                return None
            taken = _R.LINK_DOWN
        case receiving.SendAck():
            if state is State.CLOSED or not isinstance(data.answer, receiving.Deferred):
                return None
            taken = _R.SEND_ACK
        case receiving.Answered() if isinstance(data.answer, receiving.Deferred):
            return StateError
        case receiving.HelloArrived(link, incarnation, _, number):
            if data.link not in (link, None) and incarnation == data.fence and number in range(1, data.senders_number):
                return None
            taken = _hello(state, data, event)
        case receiving.UpdateArrived(link, incarnation, version):
            linked = state not in (State.UNINITIALIZED, State.CLOSED)
            if linked and incarnation >= data.fence and (link, incarnation) != (data.link, data.fence):
                return ProtocolError
            taken = _update(state, data, (incarnation, version)) if linked else _R.UPDATE
        case _:
            taken = _OWN_RESULTS[type(event)]
    return taken if (state, taken) in RECEIVER_ROWS else StateError


def effects_of_late_event(data: receiving.ReceiverData, event: receiving.Event) -> tuple[receiving.Effect, ...]:
    """The required effects of a late event.

    The event's own link closes, after a message if it failed. `SendAck` has no effect, nor has a goodbye on the current
    link.
    """
    if isinstance(event, receiving.SendAck):
        return ()
    assert isinstance(event, receiving.LinkDown | receiving.Goodbye | receiving.HelloArrived)
    closing = receiving.CloseLink(event.link)
    if isinstance(event, receiving.Goodbye):
        return () if event.link == data.link else (closing,)
    if isinstance(event, receiving.HelloArrived) or not event.failure:
        return (closing,)
    return receiving.Disown(event.link, data.fence, RefusalKind.FAILED, event.failure), closing


def _hello(state: State, data: receiving.ReceiverData, event: receiving.HelloArrived) -> ReceiverInput:
    if event.misfit or event.incarnation < data.fence:
        return _R.REJECTED
    if state is State.UNINITIALIZED:
        return _R.CONNECT
    return _R.DUPLICATE if (event.link, event.incarnation) == (data.link, data.fence) else _R.TAKEOVER


def _update(state: State, data: receiving.ReceiverData, key: tuple[int, int]) -> ReceiverInput:
    seen = [each for each in (data.decided, data.pending) if each is not None]
    if key[0] < data.fence:
        return _R.STALE
    if key in seen:
        return _R.DUPLICATE
    if any(key < each for each in seen):
        return _R.STALE
    return _R.NEWER if state is State.PENDING_ASYNC else _R.UPDATE
