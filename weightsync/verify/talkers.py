"""The messages that each role sends and receives between its steps."""

from __future__ import annotations

from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending
from weightsync.protocol._tables import State
from weightsync.protocol.messages import Bye, Hello, Message, Refusal, Update
from weightsync.verify.lines import Finding
from weightsync.verify.replaying import Machine, Moment
from weightsync.verify.talking import RULE, DueMessage, Talk, UnexpectedLine


class SenderTalk(Talk):
    """A sender's messages."""

    def __init__(self) -> None:
        super().__init__()
        #: The link that was laid and whose worker joins next; 0: none.
        self._joining = 0

    def _laid(self, moment: Moment) -> None:
        self._nothing_waits(moment)
        if self._joining:
            raise UnexpectedLine(f"no worker has joined on link {self._joining}", "first its worker joins")
        self._joining = moment.link

    def _stepped(self, moment: Moment) -> None:
        event, data = moment.event, moment.after
        assert isinstance(data, sending.SenderData)
        self._join(event)
        if isinstance(event, sending.Answer):
            self._taken(event)
        if isinstance(event, sending.LinkLost):
            self._lost(event)
        effects = () if moment.step is None else moment.step.effects
        for effect in effects:
            self._follow(effect, data.incarnation)
        if isinstance(event, sending.Answer) and not any(isinstance(each, sending.CloseLink) for each in effects):
            self._catch_up(event, data)

    def _lost(self, event: sending.LinkLost) -> None:
        link = self.open.get(event.link)
        if link is not None:
            link.received = None
            # Its last messages come before the loss that its failure causes.
            link.failing = None if link.failing == event.reason else link.failing

    def _join(self, event: object) -> None:
        match event:
            case sending.Join(worker, link):
                laid = self.open.get(link)
                if link != self._joining or laid is None or laid.worker != worker:
                    raise UnexpectedLine(f"link {link} was not just laid to worker {worker}", f"link {self._joining}")
                self._joining = 0
            case _ if self._joining and not isinstance(event, sending.LinkLost):
                raise UnexpectedLine(f"no worker has joined on link {self._joining}", "first its worker joins")

    def _follow(self, effect: object, incarnation: int) -> None:
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

    def _taken(self, event: sending.Answer) -> None:
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


class ReceiverTalk(Talk):
    """A receiver's messages."""

    def __init__(self) -> None:
        super().__init__()
        #: Links that may close without an effect, and those over which a goodbye may be sent first.
        self._may_close: set[int] = set()
        self._may_leave: set[int] = set()

    def _received(self, moment: Moment) -> None:
        data = moment.after
        assert isinstance(data, receiving.ReceiverData)
        if moment.state is State.AWAITING_ACK and moment.link == data.link:
            raise UnexpectedLine("the link in force is read while an answer is owed", "first the answer is sent")
        super()._received(moment)

    def _may_interleave(self, moment: Moment) -> bool:
        data = moment.before
        assert isinstance(data, receiving.ReceiverData)
        return isinstance(moment.event, receiving.Answered) and all(each.link != data.link for each in self.todo)

    def _is_spontaneous(self, moment: Moment, message: Message | None) -> bool:
        if message is None:
            return moment.link in self._may_close
        data = moment.after
        assert isinstance(data, receiving.ReceiverData)
        return isinstance(message, Bye) and moment.link in self._may_leave and message.incarnation == data.fence

    def _stepped(self, moment: Moment) -> None:
        event, step, data = moment.event, moment.step, moment.after
        assert isinstance(data, receiving.ReceiverData)
        if isinstance(event, receiving.HelloArrived | receiving.UpdateArrived | receiving.Goodbye):
            self._taken(event)
        if isinstance(event, receiving.LinkDown) and event.link in self.open:
            self.open[event.link].failing = None
        if isinstance(event, receiving.Close | receiving.Fail | receiving.Broken) and step is not None:
            self._may_close |= set(self.open)
        if isinstance(event, receiving.Close) and step is not None:
            self._may_leave |= set(self.open)
        for effect in () if step is None else step.effects:
            self._follow(effect, data)

    def _follow(self, effect: object, data: receiving.ReceiverData) -> None:
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

    def _taken(self, event: receiving.HelloArrived | receiving.UpdateArrived | receiving.Goodbye) -> None:
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
    talk: Talk = SenderTalk() if machine.role == "sender" else ReceiverTalk()
    for moment in machine.moments:
        try:
            talk.take(moment)
        except UnexpectedLine as unfit:
            return Finding(moment.line, unfit.what, (unfit.allowed,) if unfit.allowed else (), RULE)
    return None
