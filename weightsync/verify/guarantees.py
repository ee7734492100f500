"""Checks the guarantees on traces, independently of the machines' own logic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from weightsync.engine.recorder import LineKind
from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending
from weightsync.protocol._tables import SenderInput, State
from weightsync.protocol.codec import slot_digest
from weightsync.protocol.machine import Role
from weightsync.protocol.messages import Ack, Update
from weightsync.protocol.report import Evidence, OutcomeKind
from weightsync.verify.lines import Finding
from weightsync.verify.network import Network
from weightsync.verify.replaying import Machine, Moment

Key = tuple[int, int]
_COUNTS = (SenderInput.REPLY, SenderInput.SETTLED, SenderInput.CAUGHT_UP)


def breaches(network: Network) -> Iterator[Finding]:
    """For each machine, the first moment at which a guarantee does not hold."""
    for machine in network.machines:
        found = _sender_breaches(network, machine) if machine.role is Role.SENDER else _receiver_breaches(machine)
        yield from _first(found)
        yield from _first(_closed_is_final(machine))


def _first(findings: Iterator[Finding]) -> Iterator[Finding]:
    found = next(findings, None)
    if found is not None:
        yield found


def _breach(moment: Moment, rule: str, what: str) -> Finding:
    return Finding(moment.line, what, (), rule)


def _closed_is_final(machine: Machine) -> Iterator[Finding]:
    for moment in machine.moments:
        if moment.state_before is State.CLOSED and moment.state is not State.CLOSED:
            yield _breach(moment, "G9 ClosedIsFinal", "a closed machine takes another step")


def _receiver_breaches(machine: Machine) -> Iterator[Finding]:
    served: Key = (0, 0)
    fence = 0
    named: dict[Key, set[bytes]] = {}
    for moment in machine.moments:
        before, after, event = moment.before, moment.after, moment.event
        assert isinstance(before, receiving.ReceiverData)
        assert isinstance(after, receiving.ReceiverData)
        if isinstance(moment.message, Update) and moment.line.what is LineKind.RECEIVED:
            key = moment.message.incarnation, moment.message.version
            named.setdefault(key, set()).add(_ack_digest(moment.message))
        if after.fence < fence:
            yield _breach(moment, "G4 ServingIsMonotone", "its fence falls")
        fence = after.fence
        if after.decided is None:  # it was overwritten by hand, and may be applied again
            served = (0, 0)
        if after.served != before.served and after.served is not None:
            yield from _check_served(moment, after.served, served, fence, named)
            served = max(served, after.served)
        if isinstance(event, receiving.Refused) and after.served != before.served:
            yield _breach(moment, "G6 RefusalKeepsServing", "a refusal changes the served version")


def _ack_digest(update: Update) -> bytes:
    """What an ack of the update must name; empty if it is not known."""
    if update.digest or update.slot is None or update.extras:  # long extra state is recorded as a hash of it
        return update.digest
    return slot_digest(update.slot.seal, update.incarnation, update.version, update.layout_digest, b"")


def _check_served(moment: Moment, new: Key, served: Key, fence: int, named: dict[Key, set[bytes]]) -> Iterator[Finding]:
    if new <= served or new[0] < fence:
        yield _breach(moment, "G4 ServingIsMonotone", f"version {new[1]} is served after version {served[1]}")
    if not isinstance(moment.event, receiving.Applied | receiving.Defer):
        yield _breach(moment, "G6 RefusalKeepsServing", "the served version changes, but nothing was applied")
        return
    answer = moment.event.answer
    if (answer.incarnation, answer.version) != new:
        yield _breach(
            moment, "G1 AckNamesItsVersion", f"version {new[1]} is applied, but its ack names {answer.version}"
        )
    arrived = named.get(new)
    if arrived is None:
        yield _breach(moment, "G2 AckedMeansServed", f"version {new[1]} never arrived")
    elif _names_another(answer, arrived):
        applied = f"digest {answer.digest.hex()}" if answer.digest else "no digest"
        what = f"{applied} was applied, but {', '.join(each.hex() for each in arrived)} arrived"
        yield _breach(moment, "G2 AckedMeansServed", what)


def _names_another(ack: Ack, named: set[bytes]) -> bool:
    """Whether an ack names something not in ``named``; False if it is unknown what it must name."""
    return b"" not in named and ack.digest not in named


@dataclass(frozen=True, slots=True)
class Sent:
    """What a sender has sent for its versions.

    Attributes:
        digests: the digest of each version that has one.
        named: what an ack of a version must name, for each version and worker. A worker may have several links one
            after another, and over a later link name what it applied over an earlier one.
    """

    digests: dict[int, bytes] = field(default_factory=dict)
    named: dict[tuple[int, int], set[bytes]] = field(default_factory=dict)


def _sender_breaches(network: Network, machine: Machine) -> Iterator[Finding]:
    targets: dict[int, tuple[int, ...]] = {}
    sent = Sent()
    for moment in machine.moments:
        before, after = moment.before, moment.after
        assert isinstance(before, sending.SenderData)
        assert isinstance(after, sending.SenderData)
        if after.version != before.version:
            if before.outstanding is not None or after.version <= before.version:
                yield _breach(moment, "G5 OneOutstanding", "a version is dispatched while another is outstanding")
            asked = moment.event.targets
            targets[after.version] = tuple(before.workers) if asked is None else asked
        yield from _check_sends(machine, moment, targets, sent)
        yield from _check_conclusion(moment, targets)
        yield from _check_report(moment, targets)
        if moment.step is not None and moment.step.input in _COUNTS:
            yield from _counts(network, machine, moment, sent)
        if isinstance(moment.event, sending.Join) and moment.step is not None:
            yield from _check_hello(moment, targets)


def _check_sends(
    machine: Machine, moment: Moment, targets: dict[int, tuple[int, ...]], sent: Sent
) -> Iterator[Finding]:
    update = moment.message
    if moment.line.what is not LineKind.SENT or not isinstance(update, Update):
        return
    workers = machine.workers[moment.link]
    data = moment.after
    assert isinstance(data, sending.SenderData)
    wide = update.version == data.due_all
    if not wide and not set(workers) & set(targets.get(update.version, ())):
        yield _breach(
            moment, "G7 OnlyTargetsChange", f"version {update.version} is sent to {workers}, which is no target of it"
        )
    for worker in workers:
        sent.named.setdefault((update.version, worker), set()).add(_ack_digest(update))
    if update.digest and sent.digests.setdefault(update.version, update.digest) != update.digest:
        yield _breach(moment, "G1 AckNamesItsVersion", f"version {update.version} is sent with two digests")


def _check_conclusion(moment: Moment, targets: dict[int, tuple[int, ...]]) -> Iterator[Finding]:
    for effect in () if moment.step is None else moment.step.effects:
        if isinstance(effect, sending.Conclude):
            out = effect.outstanding
            if out.owed or set(out.outcomes) != set(targets.get(out.version, ())):
                what = f"version {out.version} is over, but its outcomes are those of {sorted(out.outcomes)}"
                yield _breach(moment, "G11 OutcomesAreTrue", what)


def _check_report(moment: Moment, targets: dict[int, tuple[int, ...]]) -> Iterator[Finding]:
    """A report must name each target, and no other worker."""
    version = moment.line.fields.get("version") if moment.line.what is LineKind.REPORTED else None
    reported = {int(worker) for worker in moment.line.fields["outcomes"]} if version else set()
    if version and reported != set(targets.get(version, ())):
        what = f"the report of version {version} names workers {sorted(reported)}, but its targets are others"
        yield _breach(moment, "G11 OutcomesAreTrue", what)


def _check_hello(moment: Moment, targets: dict[int, tuple[int, ...]]) -> Iterator[Finding]:
    data, worker = moment.after, moment.event.worker
    assert isinstance(data, sending.SenderData)
    for effect in () if moment.step is None else moment.step.effects:
        if isinstance(effect, sending.Greet):
            naming = [version for version, named in targets.items() if worker in named]
            due = max([data.due_all, *naming])
            if effect.due < data.due_all or effect.due > due:
                yield _breach(
                    moment, "G12 LateJoinerCatchesUp", f"version {due} is due to it, but {effect.due} is sent"
                )


def _counts(network: Network, machine: Machine, moment: Moment, sent: Sent) -> Iterator[Finding]:
    """If an answer counts, the worker must have done what it says."""
    event, data = moment.event, moment.after
    assert isinstance(data, sending.SenderData)
    ack = event.message if isinstance(event, sending.Answer) else None
    if not isinstance(ack, Ack) or ack.evidence is not Evidence.ANSWER:
        return
    if ack.incarnation != data.incarnation:
        yield _breach(moment, "G1 AckNamesItsVersion", "an ack for another sender counts")
    if _names_another(ack, sent.named.get((ack.version, event.worker), {b""})):
        what = "the digest of other weights than were sent" if ack.digest else "no digest, but one was sent"
        yield _breach(moment, "G2 AckedMeansServed", f"the ack names {what}")
    peers = [network.by_name[name] for name, _ in network.peers((machine.name, event.link))]
    if peers and not any(
        _may_have_applied(peer, (ack.incarnation, ack.version), moment, machine.clock) for peer in peers
    ):
        what = f"worker {event.worker} counts as {OutcomeKind.APPLIED.name}, but has not applied version {ack.version}"
        yield _breach(moment, "G2 AckedMeansServed", what)


def _may_have_applied(peer: Machine, key: Key, until: Moment, clock: str) -> bool:
    """Whether a receiver applied a version: before ``until``, where the times can be compared."""
    applied = peer.applied.get(key)
    if applied is not None and (peer.clock != clock or applied <= until.line.time):
        return True
    return peer.finding is not None or peer.is_unseen(clock, until.line.time)
