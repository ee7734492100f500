"""The sender's guards: which input an event is, and whom an update may go to."""

from __future__ import annotations

from collections.abc import Mapping

from weightsync._tables import SenderInput, State
from weightsync.errors import ConfigurationError, RefusedError, WorkerLostError
from weightsync.messages import Bye, Hello, Refusal
from weightsync.protocol.sender_values import (
    Abandon,
    Answer,
    Close,
    Connect,
    Deadline,
    Entry,
    Event,
    Interrupted,
    Join,
    LinkLost,
    Remove,
    Send,
    SendAsync,
    SenderData,
    Standing,
    Wait,
)


def name(state: State, data: SenderData, event: Event) -> SenderInput | None:
    """The input that the event is in this state; None for a result of the driver's own that is no longer current."""
    match event:
        case Answer():
            return _name_answer(state, data, event)
        case LinkLost(worker, link):
            if state in (State.UNINITIALIZED, State.CLOSED) or not current(data, worker, link):
                return None
            return _settling(state, data, worker, link, SenderInput.LOST)
        case Wait():
            settled = data.outstanding is not None and not data.outstanding.owed
            return SenderInput.WAIT_SETTLED if settled else SenderInput.WAIT
        case Deadline(version) | Interrupted(version):
            waited = state is State.AWAITING_ACK and data.outstanding is not None
            if not waited or data.version != version:
                return None
            return SenderInput.DEADLINE if isinstance(event, Deadline) else SenderInput.INTERRUPTED
        case _:
            return _CALLS[type(event)]


_CALLS = {
    Connect: SenderInput.CONNECT,
    Send: SenderInput.SEND,
    SendAsync: SenderInput.SEND_ASYNC,
    Abandon: SenderInput.ABANDON,
    Join: SenderInput.JOIN,
    Remove: SenderInput.REMOVE,
    Close: SenderInput.CLOSE,
}


def _name_answer(state: State, data: SenderData, event: Answer) -> SenderInput | None:
    if state is State.CLOSED:
        return None
    message = event.message
    if not current(data, event.worker, event.link) or message.incarnation != data.incarnation:
        return SenderInput.STALE
    entry = data.roll[event.worker]
    match message:
        case Hello():
            return SenderInput.ARRIVED if entry.standing is Standing.EXPECTED else SenderInput.STALE
        case Bye():
            return _settling(state, data, event.worker, event.link, SenderInput.LEFT)
        case Refusal() if ends_link(message):
            return _settling(state, data, event.worker, event.link, SenderInput.LOST)
        case _ if owes(data, event.worker, event.link) and message.version == data.version:
            return _settling(state, data, event.worker, event.link, SenderInput.REPLY)
        case _ if message.version == entry.catching != 0:
            return SenderInput.CAUGHT_UP
        case _:
            return SenderInput.STALE


def ends_link(refusal: Refusal) -> bool:
    """Whether a refusal tells that the worker takes nothing more over this link.

    The handshake was refused, something failed at the worker, or it has met a newer sender.
    """
    return refusal.version == 0 or refusal.fence > refusal.incarnation


def current(data: SenderData, worker: int, link: int) -> bool:
    """Whether that link is the worker's own, and not lost."""
    entry = data.roll.get(worker)
    return entry is not None and entry.link == link and entry.open


def owes(data: SenderData, worker: int, link: int) -> bool:
    """Whether the worker owes an answer over that link."""
    return data.outstanding is not None and data.outstanding.owed.get(worker) == link


def _settling(state: State, data: SenderData, worker: int, link: int, otherwise: SenderInput) -> SenderInput:
    """SETTLED if a caller waits and this is the last that owes."""
    last = owes(data, worker, link) and data.outstanding is not None and len(data.outstanding.owed) == 1
    return SenderInput.SETTLED if last and state is State.AWAITING_ACK else otherwise


def known(data: SenderData, worker: int) -> Entry:
    """The worker's entry on the roll.

    Raises:
        ConfigurationError: it is not on the roll.
    """
    if worker not in data.roll:
        raise ConfigurationError(
            f"unknown worker id {worker!r}: on the roll are {sorted(data.roll)}. Nothing was sent or changed; "
            "add_worker() puts a worker on the roll."
        )
    return data.roll[worker]


def targets_of(data: SenderData, targets: tuple[int, ...] | None) -> dict[int, Entry]:
    """The entries of those to send to; None: all.

    Raises:
        ConfigurationError: a worker id that is not on the roll, or none.
        WorkerLostError: every target is lost already.
        RefusedError: every target has refused the handshake.
    """
    chosen = dict.fromkeys(data.roll if targets is None else targets)
    if not chosen:
        raise _nobody(data, targets)
    entries = {worker: known(data, worker) for worker in chosen}
    if not any(entry.open for entry in entries.values()):
        raise _all_ended(entries)
    return entries


def _nobody(data: SenderData, targets: tuple[int, ...] | None) -> ConfigurationError:
    if targets is not None:
        return ConfigurationError("no worker to send to: worker_ids is empty. Nothing was sent or changed.")
    left = "".join(f" Worker {worker} left: {goodbye}." for worker, goodbye in data.left.items())
    return ConfigurationError(
        f"no worker to send to: nobody is on the roll.{left} Nothing was sent, no version was used. add_worker() puts "
        "a worker on the roll; send(allow_empty=True) sends to nobody without an error."
    )


def _all_ended(ended: Mapping[int, Entry]) -> WorkerLostError | RefusedError:
    told = {worker: entry.reason for worker, entry in ended.items()}
    if all(entry.standing is Standing.REFUSED for entry in ended.values()):
        return RefusedError(
            f"every target has refused the handshake: {told}. Nothing was sent, no version was used. Send weights of "
            "the layout that the workers' models have, or give the workers that model and add_worker() them again.",
            None,
            told,
        )
    fence = max(entry.fence for entry in ended.values())
    return WorkerLostError(
        f"every target is lost already: {told}. Nothing was sent, no version was used. add_worker() brings a worker "
        "back on a new link, remove_worker() takes it off the roll.",
        None,
        told,
        fence or None,
    )
