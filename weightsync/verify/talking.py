"""Checks drivers between steps: each effect is sent as a message, each message that arrives is taken as its event."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from weightsync.engine.recorder import LineKind
from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending
from weightsync.protocol._tables import Delivery, State
from weightsync.protocol.machine import Role
from weightsync.protocol.messages import MAX_UNANSWERED, Bye, Hello, Message, Refusal, Update, version_of
from weightsync.verify.lines import Finding
from weightsync.verify.replaying import Machine, Moment

RULE = "what the driver sends and receives"


@dataclass(frozen=True, slots=True)
class DueMessage:
    """A message that must be sent over a link; ``kind`` CloseLink: the link must close."""

    link: int
    kind: type
    incarnation: int = 0
    version: int = 0

    def __str__(self) -> str:
        if self.kind is sending.CloseLink:
            return f"link {self.link} closes"
        return f"{self.kind.__name__} of version {self.version} is sent over link {self.link}"

    def fits(self, link: int, message: Message | None) -> bool:
        """Whether it is that message, over that link."""
        if message is None:
            return self.kind is sending.CloseLink and link == self.link
        return (link, type(message), message.incarnation, version_of(message)) == (
            self.link,
            self.kind,
            self.incarnation,
            self.version,
        )


class UnexpectedLine(Exception):
    """A line that does not follow from the lines before it."""

    def __init__(self, what: str, allowed: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.allowed = allowed


@dataclass
class OpenLink:
    """An open link, and how far the driver may run ahead on it."""

    delivery: Delivery
    worker: int = 0
    unanswered: set[int] = field(default_factory=set)
    waiting: int = 0
    #: The message that arrived and was not taken yet.
    received: Message | None = None
    #: Why the link is ending, if it is; steps because of that may then come between others.
    failing: str | None = None

    @property
    def free(self) -> bool:
        """Whether an update may be sent."""
        return self.delivery.loses or len(self.unanswered) < MAX_UNANSWERED

    def answered(self, version: int) -> int:
        """Record an answer; returns the version that is sent now, or 0."""
        self.unanswered = {each for each in self.unanswered if each > version}
        if not self.waiting or not self.free:
            return 0
        waiting, self.waiting = self.waiting, 0
        self.unanswered.add(waiting)
        return waiting


class MessageChecker:
    """One machine's links, and the messages that must be sent over them. Subclasses interpret effects."""

    def __init__(self) -> None:
        self.open: dict[int, OpenLink] = {}
        self.todo: deque[DueMessage] = deque()
        #: Messages that are sent as soon as possible, whatever else waits.
        self.extra: list[DueMessage] = []

    def take(self, moment: Moment) -> None:
        """Follow one line. Raises UnexpectedLine: it does not follow from those before it."""
        line = moment.line
        match line.what:
            case LineKind.LINK:
                self._on_link_created(moment)
                self.open[moment.link] = OpenLink(Delivery[line.fields["delivery"]], line.fields.get("worker", 0))
            case LineKind.SENT:
                self._check_sent(moment, moment.message)
            case LineKind.CLOSED:
                self._check_goodbye(moment)
                self._check_sent(moment, None)
                self.open.pop(moment.link, None)
            case LineKind.RECEIVED:
                self._require_nothing_due(moment)
                self._check_received(moment)
            case LineKind.FAILED:
                if moment.link in self.open:
                    self.open[moment.link].failing = str(moment.line.fields.get("reason"))
                    self.open[moment.link].received = None
            case LineKind.STEP | LineKind.REFUSED:
                self._require_nothing_due(moment)
                self._queue_due_messages(moment)

    def _check_goodbye(self, moment: Moment) -> None:
        """A sender says goodbye as it closes a link."""
        data = moment.after
        if isinstance(data, sending.SenderData) and moment.line.fields.get("incarnation") != data.incarnation:
            raise UnexpectedLine("its goodbye names another incarnation", f"incarnation {data.incarnation}")

    def _check_sent(self, moment: Moment, message: Message | None) -> None:
        if moment.link not in self.open:
            raise UnexpectedLine(f"link {moment.link} is not open")
        for each in self.extra:
            if each.fits(moment.link, message):
                self.extra.remove(each)
                return
        self._skip_unsendable()
        if self.todo and self.todo[0].fits(moment.link, message):
            head = self.todo.popleft()
            if head.kind is Update:
                self.open[head.link].unanswered.add(head.version)
            return
        if not self._is_spontaneous(moment, message):
            due = f"now {self.todo[0]}" if self.todo else "nothing is to be sent now"
            raise UnexpectedLine("no effect of a step asks for this", due)

    def _skip_unsendable(self) -> None:
        """Leave out messages that have nowhere to go, or wait for a worker's answers."""
        while self.todo:
            head = self.todo[0]
            link = self.open.get(head.link)
            if link is not None and (head.kind is not Update or link.free):
                return
            if link is not None:
                link.waiting = head.version
            self.todo.popleft()

    def _require_nothing_due(self, moment: Moment) -> None:
        """Between steps everything is sent, unless a link fails in the meantime."""
        self._skip_unsendable()
        waiting = [*self.extra, *self.todo]
        if waiting and all(link.failing is None for link in self.open.values()) and not self._may_interleave(moment):
            raise UnexpectedLine(f"a step asked for what did not happen: {waiting[0]}", f"first {waiting[0]}")

    def _check_received(self, moment: Moment) -> None:
        link = self.open.get(moment.link)
        if link is None:
            raise UnexpectedLine(f"link {moment.link} is not open")
        if link.received is not None:
            raise UnexpectedLine(
                f"the {type(link.received).__name__} that arrived before over link {moment.link} was never taken"
            )
        link.received = moment.message

    def _is_spontaneous(self, moment: Moment, message: Message | None) -> bool:
        """Whether this may be sent without an effect that asks for it."""
        return False

    def _may_interleave(self, moment: Moment) -> bool:
        """Whether this step may come while a message waits to be sent."""
        return False

    def _on_link_created(self, moment: Moment) -> None:
        """A link is created."""

    def _queue_due_messages(self, moment: Moment) -> None:
        """A step was taken or refused: determine what must be sent now."""


class SenderMessageChecker(MessageChecker):
    """A sender's messages."""

    def __init__(self) -> None:
        super().__init__()
        #: The link that was created and whose worker joins next; 0: none.
        self._joining = 0

    def _on_link_created(self, moment: Moment) -> None:
        self._require_nothing_due(moment)
        if self._joining:
            raise UnexpectedLine(f"no worker has joined on link {self._joining}", "first its worker joins")
        self._joining = moment.link

    def _queue_due_messages(self, moment: Moment) -> None:
        event, data = moment.event, moment.after
        assert isinstance(data, sending.SenderData)
        self._check_join(event)
        if isinstance(event, sending.Answer):
            self._check_taken(event)
        if isinstance(event, sending.LinkLost):
            self._note_loss(event)
        effects = () if moment.step is None else moment.step.effects
        for effect in effects:
            self._queue_effect(effect, data.incarnation)
        if isinstance(event, sending.Answer) and not any(isinstance(each, sending.CloseLink) for each in effects):
            self._catch_up(event, data)

    def _note_loss(self, event: sending.LinkLost) -> None:
        link = self.open.get(event.link)
        if link is not None:
            link.received = None
            # Its last messages come before the loss that its failure causes.
            link.failing = None if link.failing == event.reason else link.failing

    def _check_join(self, event: object) -> None:
        match event:
            case sending.Join(worker, link):
                created = self.open.get(link)
                if link != self._joining or created is None or created.worker != worker:
                    raise UnexpectedLine(
                        f"link {link} was not just created for worker {worker}", f"link {self._joining}"
                    )
                self._joining = 0
            case _ if self._joining and not isinstance(event, sending.LinkLost):
                raise UnexpectedLine(f"no worker has joined on link {self._joining}", "first its worker joins")

    def _queue_effect(self, effect: object, incarnation: int) -> None:
        match effect:
            case sending.Greet(_, link, due):
                self.todo.append(DueMessage(link, Hello, incarnation, due))
                if due:
                    self.todo.append(DueMessage(link, Update, incarnation, due))
            case sending.Dispatch(_, link, version):
                self.todo.append(DueMessage(link, Update, incarnation, version))
            case sending.CloseLink(_, link):
                self.todo.append(DueMessage(link, sending.CloseLink))

    def _may_interleave(self, moment: Moment) -> bool:
        # A link that could not be written to is reported again when read, and is replaced or lost by then.
        return moment.step is not None and moment.step.input is None

    def _check_taken(self, event: sending.Answer) -> None:
        link = self.open.get(event.link)
        received = None if link is None else link.received
        if link is not None:
            link.received = None
        if received == event.message and link is not None and link.worker == event.worker:
            return
        raise UnexpectedLine(
            f"no such message arrived over link {event.link} from worker {event.worker}", f"what came: {received}"
        )

    def _catch_up(self, event: sending.Answer, data: sending.SenderData) -> None:
        link, message = self.open.get(event.link), event.message
        if link is not None and not isinstance(message, Hello | Bye) and message.incarnation == data.incarnation:
            waiting = link.answered(message.version)
            if waiting:
                self.extra.append(DueMessage(event.link, Update, data.incarnation, waiting))


class ReceiverMessageChecker(MessageChecker):
    """A receiver's messages."""

    def __init__(self) -> None:
        super().__init__()
        #: Links that may close without an effect, and those over which a goodbye may be sent first.
        self._may_close: set[int] = set()
        self._may_leave: set[int] = set()

    def _check_received(self, moment: Moment) -> None:
        data = moment.after
        assert isinstance(data, receiving.ReceiverData)
        if moment.state is State.AWAITING_ACK and moment.link == data.link:
            raise UnexpectedLine("the current link is read while an answer is owed", "first the answer is sent")
        super()._check_received(moment)

    def _may_interleave(self, moment: Moment) -> bool:
        data = moment.before
        assert isinstance(data, receiving.ReceiverData)
        return isinstance(moment.event, receiving.Answered) and all(each.link != data.link for each in self.todo)

    def _is_spontaneous(self, moment: Moment, message: Message | None) -> bool:
        if message is None:
            return moment.link in self._may_close
        return isinstance(message, Bye) and moment.link in self._may_leave and not message.incarnation

    def _queue_due_messages(self, moment: Moment) -> None:
        event, step, data = moment.event, moment.step, moment.after
        assert isinstance(data, receiving.ReceiverData)
        if isinstance(event, receiving.HelloArrived | receiving.UpdateArrived | receiving.Goodbye):
            self._check_taken(event)
        if isinstance(event, receiving.LinkDown) and event.link in self.open:
            self.open[event.link].failing = None
        if isinstance(event, receiving.Close | receiving.Fail | receiving.Broken) and step is not None:
            self._may_close |= set(self.open)
            self._may_leave |= set(self.open)
        for effect in () if step is None else step.effects:
            self._queue_effect(effect, data)

    def _queue_effect(self, effect: object, data: receiving.ReceiverData) -> None:
        match effect:
            case receiving.Greet(link):
                served = data.served
                version = served[1] if served and served[0] == data.fence else 0
                self.todo.append(DueMessage(link, Hello, data.fence, version))
            case receiving.Reject(link, incarnation) | receiving.Disown(link, incarnation):
                self.todo.append(DueMessage(link, Refusal, incarnation, 0))
            case receiving.Tell(link, key):
                self.todo.append(DueMessage(link, Refusal, *key))
            case receiving.Reply(link, answer):
                self.todo.append(DueMessage(link, type(answer), answer.incarnation, answer.version))
            case receiving.CloseLink(link):
                self.todo.append(DueMessage(link, sending.CloseLink))
            case receiving.Leave(link):
                self.todo.append(DueMessage(link, Bye, data.fence))
                self.todo.append(DueMessage(link, sending.CloseLink))

    def _check_taken(self, event: receiving.HelloArrived | receiving.UpdateArrived | receiving.Goodbye) -> None:
        link = self.open.get(event.link)
        received = None if link is None else link.received
        if link is not None:
            link.received = None
        wanted = _MESSAGES[type(event)]
        fits = received is not None and isinstance(received, wanted) and received.incarnation == event.incarnation
        if isinstance(event, receiving.UpdateArrived):
            fits = fits and isinstance(received, Update) and received.version == event.version
        if not fits:
            raise UnexpectedLine(f"no such {wanted.__name__} arrived over link {event.link}", f"what came: {received}")


_MESSAGES = {receiving.HelloArrived: Hello, receiving.UpdateArrived: Update, receiving.Goodbye: Bye}


def listen(machine: Machine) -> Finding | None:
    """The first line at which a machine sends or takes a message that it may not, if there is one."""
    checker: MessageChecker = SenderMessageChecker() if machine.role is Role.SENDER else ReceiverMessageChecker()
    for moment in machine.moments:
        try:
            checker.take(moment)
        except UnexpectedLine as unfit:
            return Finding(moment.line, unfit.what, (unfit.allowed,) if unfit.allowed else (), RULE)
    return None
