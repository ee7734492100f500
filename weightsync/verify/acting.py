"""The steps of a run's machines as actions of AckProtocol.tla, with the states that they lead to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weightsync.engine.recorder import LineKind
from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending
from weightsync.protocol._actions import Action
from weightsync.protocol._tables import RefusalKind, State
from weightsync.protocol.messages import Ack, Bye, Hello, Refusal
from weightsync.protocol.report import Evidence
from weightsync.verify.naming import BeyondTheModelError, Naming, RecordedAction, Value
from weightsync.verify.replaying import Machine, Moment


class SenderActs:
    """The actions of senders."""

    def __init__(self, names: Naming) -> None:
        self._names = names

    def of(self, machine: Machine, number: int) -> Iterator[tuple[int, RecordedAction]]:
        """The actions of one sender, each with its time."""
        if number > 1:
            line = machine.lines[0]
            yield line.time, RecordedAction(line, {"a": Action.COPY, "s": 1, "t": number})
        for moment in machine.of(LineKind.STEP):
            if moment.step is None or moment.step.input is None:
                continue
            if isinstance(moment.event, sending.Answer) and _is_for_another_sender(machine, moment.event):
                continue
            action = self._sender_action(machine, number, moment)
            yield moment.line.time, RecordedAction(moment.line, {**action, **self._sender_state(machine, moment)})

    def _sender_action(self, machine: Machine, s: int, moment: Moment) -> dict[str, Value]:
        match moment.event:
            case sending.Connect(incarnation):
                if not moment.before.workers:  # type: ignore[union-attr]
                    raise BeyondTheModelError("a sender connects without workers")
                self._require_above_known_fences(moment, incarnation)
                return {"a": Action.CONNECT, "s": s, "c": self._names.ranks[incarnation]}
            case sending.Send(targets):
                return self._dispatch("Send", s, targets)
            case sending.SendAsync(targets):
                return self._dispatch("SendAsync", s, targets)
            case sending.Wait() | sending.Abandon():
                return {"a": type(moment.event).__name__, "s": s}
            case sending.Deadline() | sending.Interrupted():
                return {"a": type(moment.event).__name__, "s": s}
            case sending.Close():
                return {"a": Action.CLOSE_SENDER, "s": s}
            case sending.Join(worker, _) | sending.Remove(worker):
                self._require_lost(moment, worker)
                return {"a": type(moment.event).__name__, "s": s, "w": self._names.workers[worker]}
            case sending.LinkLost(_, link):
                return self._lost_action(machine, s, link)
            case sending.Answer():
                return self._answer(machine, s, moment.event)
        raise BeyondTheModelError(f"{moment.event}")

    def _require_above_known_fences(self, moment: Moment, incarnation: int) -> None:
        """In the model, whoever closes a fenced sender passes the fence to the next sender's `connect(fence=)`."""
        for name in self._names.senders:
            earlier = [each for each in self._names.network.by_name[name].moments if each.line.time < moment.line.time]
            if not earlier or earlier[-1].state is not State.CLOSED:
                continue
            data = earlier[-1].after
            assert isinstance(data, sending.SenderData)
            if any(entry.fence >= incarnation for entry in data.workers.values()):
                raise BeyondTheModelError("a sender does not rise above a fence that a closed sender was told")

    def _require_lost(self, moment: Moment, worker: int) -> None:
        data = moment.before
        assert isinstance(data, sending.SenderData)
        entry = data.workers.get(worker)
        joins = isinstance(moment.event, sending.Join)
        if entry is not None and entry.open and (joins or data.incarnation):
            raise BeyondTheModelError("a link is replaced before the sender connects")

    def _dispatch(self, name: str, s: int, targets: tuple[int, ...] | None) -> dict[str, Value]:
        if targets is None:
            return {"a": f"{name}All", "s": s}
        return {"a": f"{name}To", "s": s, "ws": frozenset(self._names.workers[worker] for worker in targets)}

    def _lost_action(self, machine: Machine, s: int, link: int) -> dict[str, Value]:
        return {"a": "Lost", "s": s, "w": self._names.links[machine.name, link][0]}

    def _answer(self, machine: Machine, s: int, event: sending.Answer) -> dict[str, Value]:
        w, k = self._names.links[machine.name, event.link]
        message = event.message
        if not self._names.network.hello_receivers[machine.name, event.link]:
            raise BeyondTheModelError("a worker is not recorded, or has no weightsync receiver")
        if message.incarnation != machine.incarnation:
            raise BeyondTheModelError("an answer was meant for another sender")
        where = {"s": s, "w": w, "k": k}
        match message:
            case Hello():
                return {"a": Action.ANSWER_HELLO, **where}
            case Bye() if not self._closed_current_link(machine, event):
                raise BeyondTheModelError("a worker said goodbye over a link that was not its current one")
            case Bye():
                return {"a": Action.ANSWER_BYE, **where}
            case Ack() | Refusal() if message.evidence is not Evidence.ANSWER and not self._was_sent(machine, event):
                raise BeyondTheModelError("an adapter answered for its worker")
            case Ack():
                return {"a": Action.ANSWER_ACK, **where, "n": message.version}
            case Refusal(version=0, kind=kind):
                return {"a": Action.ANSWER_REJECTED, **where, "kind": kind.name}
            case Refusal(version=version, kind=kind):
                return {"a": Action.ANSWER_REFUSAL, **where, "n": version, "kind": kind.name}

    def _closed_current_link(self, machine: Machine, event: sending.Answer) -> bool:
        """Whether the worker closed while this was its current link."""
        return any(
            moment.before.link == link  # type: ignore[union-attr]
            for name, link in self._names.network.hello_receivers[machine.name, event.link]
            for moment in self._names.network.by_name[name].of(LineKind.STEP)
            if isinstance(moment.event, receiving.Close)
        )

    def _was_sent(self, machine: Machine, event: sending.Answer) -> bool:
        ends = self._names.network.hello_receivers[machine.name, event.link]
        return any(sent.message == event.message for end in ends for sent in self._names.network.sent[end])

    def _sender_state(self, machine: Machine, moment: Moment) -> dict[str, Value]:
        data, out, reported = moment.after, None, True
        assert isinstance(data, sending.SenderData)
        out = data.outstanding
        if out is None:
            ends = [effect for effect in moment.step.effects if isinstance(effect, sending.Conclude)]  # type: ignore[union-attr]
            out, reported = (ends[0].outstanding, True) if ends else (None, False)
        return {
            "who": "s",
            "st": moment.state.value,
            "inc": self._names.ranks.get(data.incarnation, 0),
            "v": data.version,
            "all": data.due_all,
            "members": tuple(self._entry(machine, data, worker) for worker in self._names.workers),
            "reported": reported,
            "out": tuple(_outcome(out, worker) for worker in self._names.workers),
        }

    def _entry(self, machine: Machine, data: sending.SenderData, worker: int) -> tuple[Value, ...]:
        entry = data.workers.get(worker)
        if entry is None:
            return ("NONE", 0, 0, 0, 0, 0)
        k = self._names.links[machine.name, entry.link][1]
        fence = self._names.ranks.get(entry.fence, 0)
        return (entry.link_state.name, k, entry.served, entry.due, entry.catching, fence)


class WorkerActs:
    """The actions of workers."""

    def __init__(self, names: Naming) -> None:
        self._names = names

    def of(self, w: int) -> Iterator[tuple[int, RecordedAction]]:
        """The actions of one worker's processes, one process after another."""
        lives = sorted(
            (self._names.network.by_name[name] for name, number in self._names.worker_of.items() if number == w),
            key=lambda machine: machine.lines[0].time,
        )
        for life, after in zip(lives, [*lives[1:], None], strict=True):
            acts = [*self._of_receiver(life, w)]
            yield from acts
            # The model treats a process that has done nothing as the process that follows it.
            if after is not None and acts:
                end = life.lines[-1]
                if any(time < end.time for time in self._link_times(after)):
                    raise BeyondTheModelError("two processes of one worker overlap")
                yield end.time, RecordedAction(end, {"a": Action.CRASH_RECEIVER, "w": w})

    def _unrecorded_answer(self, machine: Machine, w: int, sent: Moment | None) -> Iterator[tuple[int, RecordedAction]]:
        """An ANSWERED that the worker did not record: its answer was sent, since a sender received it."""
        if sent is not None and self._arrived(machine, sent):
            step = receiving.step(sent.state, sent.after, receiving.Answered())  # type: ignore[arg-type]
            answered = replace(sent, event=receiving.Answered(), state=step.to, after=step.data)
            shown = self._receiver_state(machine, answered)
            yield sent.line.time, RecordedAction(sent.line, {"a": Action.ANSWERED, "w": w, **shown})

    def _arrived(self, machine: Machine, moment: Moment) -> bool:
        """Whether the message was received at the other end of the link."""
        network = self._names.network
        return any(
            received.message == moment.message
            for name, link in network.hellos[machine.name, moment.link]
            for received in network.by_name[name].of(LineKind.RECEIVED)
            if received.link == link
        )

    def _link_times(self, receiver: Machine) -> Iterator[int]:
        """The times at which links to a receiver were created."""
        for (name, _), ends in self._names.network.hellos.items():
            for sender, link in ends if name == receiver.name else ():
                for moment in self._names.network.by_name[sender].of(LineKind.LINK):
                    if moment.link == link:
                        yield moment.line.time

    def _of_receiver(self, machine: Machine, w: int) -> Iterator[tuple[int, RecordedAction]]:
        #: The answer that was given to a link and may not have been sent yet.
        owed: Moment | None = None
        for moment in machine.moments:
            event, line = moment.event, moment.line
            if line.what is LineKind.SENT and isinstance(moment.message, Ack | Refusal):
                owed = moment if moment.state is State.AWAITING_ACK and moment.message == _answer(moment) else owed
            if line.what is LineKind.REFUSED:
                raise BeyondTheModelError("a peer broke the protocol")
            if isinstance(event, receiving.Invalidate) and owed is not None:
                raise BeyondTheModelError("weights were applied by hand while an answer was in flight")
            if line.what is not LineKind.STEP or moment.step is None or moment.step.input is None:
                continue
            time = line.time
            if isinstance(event, receiving.Answered) and owed is not None:
                # In the model, an answer is sent when the receiver learns that it was; a sender may have read it
                # before.
                time, owed = owed.line.time, None
            elif moment.state is not State.AWAITING_ACK:
                yield from self._unrecorded_answer(machine, w, owed)
                owed = None
            action = self._receiver_action(machine, w, moment)
            if action is not None:
                yield time, RecordedAction(line, {**action, **self._receiver_state(machine, moment)})
        yield from self._unrecorded_answer(machine, w, owed)

    def _receiver_action(self, machine: Machine, w: int, moment: Moment) -> dict[str, Value] | None:
        event = moment.event
        match event:
            case receiving.HelloArrived(misfit=misfit):
                return {
                    "a": Action.MISFIT if misfit else Action.HELLO_ARRIVED,
                    **self._names.model_link(machine, w, event.link),
                }
            case receiving.UpdateArrived(version=version):
                return {"a": Action.UPDATE_ARRIVED, **self._names.model_link(machine, w, event.link), "n": version}
            case receiving.LinkDown(link) | receiving.Goodbye(link):
                if moment.before.link is None and moment.state_before is State.UNINITIALIZED:  # type: ignore[union-attr]
                    return None
                failed = isinstance(event, receiving.LinkDown) and event.failure
                return {
                    "a": Action.LINK_FAILED if failed else Action.LINK_DOWN,
                    **self._names.model_link(machine, w, link),
                }
            case receiving.Close():
                return {"a": Action.CLOSE_RECEIVER, "w": w}
            case receiving.Fail():
                return {"a": Action.FAIL_RECEIVER, "w": w}
            case _:
                return {"a": type(event).__name__, "w": w}

    def _receiver_state(self, machine: Machine, moment: Moment) -> dict[str, Value]:
        data = moment.after
        assert isinstance(data, receiving.ReceiverData)
        where = (0, 0)
        if data.link is not None:
            over = self._names.model_link(machine, 0, data.link)
            where = (over["s"], over["k"])
        return {
            "who": "r",
            "st": moment.state.value,
            "link": where,
            "fence": self._names.ranks.get(data.fence, 0),
            "decided": self._names.key(data.decided),
            "pending": self._names.key(data.pending),
            "served": self._names.key(data.served),
            "answer": "NONE" if data.answer is None else _KINDS[type(data.answer)],
        }


_KINDS = {Ack: "ACK", receiving.Deferred: "DEFERRED", Refusal: RefusalKind.REFUSED.name}


def _is_for_another_sender(machine: Machine, event: sending.Answer) -> bool:
    """Whether it is a goodbye for another sender, or from a worker without a sender. The model has no such message."""
    return isinstance(event.message, Bye) and event.message.incarnation != machine.incarnation


def _answer(moment: Moment) -> object:
    return moment.after.answer  # type: ignore[union-attr]


def _outcome(out: sending.Outstanding | None, worker: int) -> str:
    if out is None or (worker not in out.owed and worker not in out.outcomes):
        return "NONE"
    return "PENDING" if worker in out.owed else out.outcomes[worker].kind.name
