"""The network between the machines: each message that arrives was sent at the other end, as the link promises."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from weightsync.engine.recorder import LineKind, plain
from weightsync.protocol import sender as sending
from weightsync.protocol._tables import Delivery
from weightsync.protocol.machine import Role
from weightsync.protocol.messages import Ack, Bye, Hello, Message, Refusal, Update, version_of
from weightsync.protocol.report import Evidence
from weightsync.verify.lines import Finding, Line
from weightsync.verify.replaying import Machine, Moment

RULE = "the network"
#: A machine and the number of one of its links.
LinkKey = tuple[str, int]


@dataclass(slots=True)
class SentMessage:
    """A message that was given to a link."""

    line: Line
    clock: str
    message: Message
    key: str
    #: The lines with which it arrived; more than one where the link duplicates.
    arrivals: list[Line] = field(default_factory=list)

    @property
    def taken(self) -> bool:
        """Whether it has arrived."""
        return bool(self.arrivals)


@dataclass
class Network:
    """All machines of a trace, and which of them exchanged messages."""

    machines: Sequence[Machine]
    by_name: dict[str, Machine] = field(default_factory=dict)
    #: Senders by incarnation, with the time they connected. Incarnations may be equal under a test's clock.
    senders: dict[int, list[tuple[int, Machine]]] = field(default_factory=lambda: defaultdict(list))
    #: The messages that each end of a link was given, in order.
    sent: dict[LinkKey, list[SentMessage]] = field(default_factory=lambda: defaultdict(list))
    delivery: dict[LinkKey, Delivery] = field(default_factory=dict)
    #: The links of senders whose Hello arrived over a receiver's link, and the reverse.
    hellos: dict[LinkKey, list[LinkKey]] = field(default_factory=lambda: defaultdict(list))
    hello_receivers: dict[LinkKey, list[LinkKey]] = field(default_factory=lambda: defaultdict(list))
    #: Receivers, and the senders whose handshakes reached them over any link.
    connected: list[tuple[str, str]] = field(default_factory=list)
    #: The incarnations whose handshakes arrived over a receiver's link, recorded or not.
    met: dict[LinkKey, set[int]] = field(default_factory=lambda: defaultdict(set))
    #: Messages whose sender is in no file or was no longer recorded.
    unseen: list[Line] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.by_name = {machine.name: machine for machine in self.machines}
        for machine in self.machines:
            if machine.incarnation:
                self.senders[machine.incarnation].append((_connected(machine), machine))
            for moment in machine.of(LineKind.LINK, LineKind.SENT, LineKind.CLOSED):
                self._record_line(machine, moment)
        for machine in self.machines:
            if machine.role is Role.RECEIVER:
                self._join(machine)

    def _record_line(self, machine: Machine, moment: Moment) -> None:
        place = (machine.name, moment.link)
        if moment.line.what is LineKind.LINK:
            self.delivery[place] = Delivery[moment.line.fields["delivery"]]
            return
        message = moment.message
        if message is None:
            fields = moment.line.fields
            if machine.role is Role.RECEIVER:
                return  # it sent the reason, or nothing
            message = Bye(model_id=machine.model_id, incarnation=fields["incarnation"])
        self.sent[place].append(SentMessage(moment.line, machine.clock, message, _key(message)))

    def _join(self, receiver: Machine) -> None:
        for moment in receiver.of(LineKind.RECEIVED):
            hello = moment.message
            if not isinstance(hello, Hello):
                continue
            ours = (receiver.name, moment.link)
            self.met[ours].add(hello.incarnation)
            sender = self._sender(hello.incarnation, moment)
            if sender is None:
                continue
            self.connected.append((receiver.name, sender.name))
            if hello.link:
                theirs = (sender.name, hello.link)
                if theirs not in self.hellos[ours]:
                    self.hellos[ours].append(theirs)
                    self.hello_receivers[theirs].append(ours)

    def peers(self, place: LinkKey) -> list[LinkKey]:
        """The other ends of a link, as far as they are recorded."""
        return self.hellos[place] + self.hello_receivers[place]

    def findings(self) -> Iterator[Finding]:
        """The first message over each link that could not have arrived that way."""
        for machine in self.machines:
            newest: dict[LinkKey, int] = {}
            broken: set[int] = set()
            for moment in machine.of(LineKind.RECEIVED):
                if moment.link in broken:
                    continue
                found = self._check_arrival(machine, moment, newest)
                if found is not None:
                    broken.add(moment.link)
                    yield found

    def _check_arrival(self, machine: Machine, moment: Moment, newest: dict[LinkKey, int]) -> Finding | None:
        message = moment.message
        assert message is not None
        place = (machine.name, moment.link)
        ends = self._origins(machine, moment, message)
        if not ends and self._lacks_handshake(place, message):
            return Finding(moment.line, f"no handshake of incarnation {message.incarnation} arrived", (), RULE)
        if not ends:
            self.unseen.append(moment.line)
            return None
        index = self._match(ends, message, (machine.clock, moment.line.time))
        if (index is None or self.sent[index[0]][index[1]].taken) and self._may_be_unrecorded(machine, moment, ends):
            self.unseen.append(moment.line)
            return None
        if index is None:
            return self._never_sent_finding(moment, ends, message)
        end, at = index
        sent = self.sent[end][at]
        if sent.clock == machine.clock and sent.line.time > moment.line.time:
            return Finding(moment.line, f"it arrived before it was sent ({sent.line.place})", (), RULE)
        if sent.taken and not self.delivery[place].duplicates:
            return Finding(moment.line, f"it arrived again: {_where(sent)}", (self._promise(place),), RULE)
        sent.arrivals.append(moment.line)
        return self._check_order(machine, moment, newest, end, at)

    def _sender(self, incarnation: int, moment: Moment) -> Machine | None:
        """The sender of an incarnation: if there are several, the last that had connected by then."""
        known = self.senders.get(incarnation, [])
        before = [(time, machine.name) for time, machine in known if time <= moment.line.time]
        return self.by_name[max(before)[1]] if before else known[0][1] if known else None

    def _origins(self, machine: Machine, moment: Moment, message: Message) -> list[LinkKey]:
        """The ends of links that it may have come from; none: its sender is not recorded."""
        place = (machine.name, moment.link)
        if machine.role is Role.SENDER:
            known = self.hello_receivers[place]
            if message.incarnation == machine.incarnation or not known:
                return known
            return [*known, *(end for end in self.sent if end not in known and self._has_role(end, Role.RECEIVER))]
        sender = self._sender(message.incarnation, moment)
        if sender is None:
            return []
        over = [end for end in self.hellos[place] if end[0] == sender.name]
        return over or [end for end in self.sent if end[0] == sender.name]

    def _lacks_handshake(self, place: LinkKey, message: Message) -> bool:
        """Whether an ordered link has delivered handshakes, but none of that incarnation."""
        met = self.met[place]
        ordered = not self.delivery[place].reorders
        return bool(met) and ordered and not isinstance(message, Hello) and message.incarnation not in met

    def _may_be_unrecorded(self, machine: Machine, moment: Moment, ends: Sequence[LinkKey]) -> bool:
        """Whether a peer's recording had ended by then, so that it may have sent this unseen."""
        return any(self.by_name[name].is_unseen(machine.clock, moment.line.time) for name, _ in ends)

    def _has_role(self, end: LinkKey, role: Role) -> bool:
        return self.by_name[end[0]].role is role

    def _match(self, ends: Sequence[LinkKey], message: Message, now: tuple[str, int]) -> tuple[LinkKey, int] | None:
        """Where it was sent: preferably a message that was sent by now and has not arrived yet."""
        wanted, later, again = _key(message), None, None
        for end in ends:
            for at, sent in enumerate(self.sent[end]):
                if sent.key != wanted:
                    continue
                if sent.taken:
                    again = (end, at)
                elif sent.clock == now[0] and sent.line.time > now[1]:
                    later = later or (end, at)
                else:
                    return end, at
        return again or later

    def _never_sent_finding(self, moment: Moment, ends: Sequence[LinkKey], message: Message) -> Finding | None:
        # An adapter without a weightsync receiver answers in its place, and records that.
        if isinstance(message, Ack | Refusal) and message.evidence is not Evidence.ANSWER:
            return None
        if any(self.by_name[end[0]].finding is not None for end in ends):
            return None
        waiting = [_message_text(each.message) for end in ends for each in self.sent[end] if not each.taken]
        on_its_way = f"in flight there: {', '.join(waiting) or 'nothing'}"
        return Finding(moment.line, f"{_message_text(message)} arrived, but was never sent", (on_its_way,), RULE)

    def _check_order(
        self, machine: Machine, moment: Moment, newest: dict[LinkKey, int], end: LinkKey, at: int
    ) -> Finding | None:
        place = (machine.name, moment.link)
        delivery, before = self.delivery[place], newest.get(end, -1)
        assert moment.message is not None
        # A message about another sender's versions may come from any of its workers' ends.
        of_another_sender = machine.role is Role.SENDER and moment.message.incarnation != machine.incarnation
        if not of_another_sender:
            newest[end] = max(before, at)
        if of_another_sender or delivery.reorders:
            return None
        if at < before:
            return Finding(moment.line, "it arrived after a message that was sent later", (self._promise(place),), RULE)
        missed = [each for each in self.sent[end][before + 1 : at] if self._had_to_arrive(each, machine, end)]
        if missed and not delivery.loses:
            what = f"{_message_text(missed[0].message)}, sent before it ({missed[0].line.place}), has not arrived"
            return Finding(moment.line, what, (self._promise(place),), RULE)
        return None

    def _had_to_arrive(self, sent: SentMessage, machine: Machine, end: LinkKey) -> bool:
        """Whether the skipped message had to arrive. An update that the adapter reported as lost did not have to."""
        message = sent.message
        if sent.taken or isinstance(message, Bye):
            return False
        if machine.role is Role.SENDER:
            return message.incarnation == machine.incarnation
        received = (moment.message for moment in self.by_name[end[0]].of(LineKind.RECEIVED) if moment.link == end[1])
        return not any(
            isinstance(each, Refusal) and each.evidence is not Evidence.ANSWER and each.version == version_of(message)
            for each in received
        )

    def _promise(self, place: LinkKey) -> str:
        return f"this link promises {self.delivery[place].name}"


#: The fields that adapters add to a message in flight, or express differently.
_ADAPTER_FIELDS = frozenset({"layout", "slot", "payload_id", "extras", "form"})
#: The fields that may differ for a delta: if the worker does not hold its base, the whole weights follow.
_DELTA_FIELDS = frozenset({"nbytes", "base"})


def _key(message: Message) -> str:
    """The part of a message that must be the same at both ends."""
    match message:
        case Bye():
            return f"Bye {message.model_id} {message.incarnation}"
        case Refusal():
            # Text that cannot be encoded is transmitted escaped.
            texts = message.reason, message.remote_traceback
            reason, trace = (text.encode(errors="backslashreplace").decode() for text in texts)
            message = replace(message, reason=reason, remote_traceback=trace)
    theirs = (
        _ADAPTER_FIELDS | _DELTA_FIELDS if isinstance(message, Update) and message.base is not None else _ADAPTER_FIELDS
    )
    return json.dumps({name: value for name, value in plain(message).items() if name not in theirs})


def _connected(sender: Machine) -> int:
    """When a sender connected."""
    return next(moment.line.time for moment in sender.of(LineKind.STEP) if isinstance(moment.event, sending.Connect))


def _message_text(message: Message) -> str:
    version = "" if isinstance(message, Bye) else f" of version {version_of(message)}"
    return f"{type(message).__name__}{version}"


def _where(sent: SentMessage) -> str:
    return f"sent once, at {sent.line.place}"
