"""The actors of one path of the model's graph: real drivers and their links, which take the model's actions.

Actions have the model's names and arguments. An action that reads a message waits for it, since in the model the
message is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from weightsync.clock import Deadline, new_incarnation
from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending
from weightsync.protocol._actions import Action
from weightsync.protocol._tables import State
from weightsync.protocol.messages import Ack, Bye, Hello, Message, Refusal, Update
from weightsync.testing.link_pair import End
from weightsync.testing.link_setup import LinkSetup
from weightsync.testing.payloads import Payloads, ack_of, refusal_of
from weightsync.testing.projecting import ReceiverPlayer, SenderPlayer
from weightsync.testing.replay_data import Configuration, Step
from weightsync.testing.rules import Rule, RuleViolation
from weightsync.testing.step_gate import StepGate
from weightsync.transports.base import Received

#: The size of each version's weights.
_NBYTES = 1000


class MessageLost(Exception):
    """The adapter lost a message that the path needs; its delivery permits that."""


class ReplayActors:
    """The senders, receivers and links of one path.

    Args:
        link_setup: makes the links.
        configuration: the configuration that the path belongs to.

    Attributes:
        senders: the senders, by their number in the model.
        receivers: each worker's receiver.
        base: the incarnation that the model calls 0.
    """

    def __init__(self, link_setup: LinkSetup, configuration: Configuration) -> None:
        self.link_setup = link_setup
        self.payloads = Payloads(_NBYTES, link_setup.storage)
        self.base = new_incarnation(0)
        self.senders: dict[int, SenderPlayer] = {1: SenderPlayer()}
        self._dead: set[int] = set()
        self.receivers = {worker: ReceiverPlayer() for worker in range(1, configuration.workers + 1)}
        self._laid: dict[tuple[int, int], int] = {}
        #: The owner of each link's far end.
        self._owners: dict[tuple[int, int, int], ReceiverPlayer] = {}
        self._cuts: dict[tuple[int, int, int], Callable[[], None]] = {}
        self._step: Step | None = None

    def take(self, step: Step) -> None:
        """Take the step's action.

        Raises:
            ProtocolError: a link was closed.
            RuleViolation: the adapter broke a rule on the way.
            MessageLost: the adapter lost a message, as it may.
        """
        name, *arguments = step.label
        self._step = step
        self._acts()[name](*arguments)

    def finish(self) -> None:
        """Close everything that is left; every buffer must then be free."""
        for receiver in self.receivers.values():
            receiver.served = None
            if receiver.driver.machine.state is not State.CLOSED:
                receiver.driver.close()
        for s, player in self.senders.items():
            if s not in self._dead:
                player.driver.take(sending.Close())
        self.link_setup.watch.check()
        self.payloads.all_free(self.link_setup)

    def _acts(self) -> Mapping[str, Callable[..., None]]:
        """The actions that the senders, the receivers and the network of a path can take, by name."""
        return {
            Action.COPY: self._copy,
            Action.DIE: self._die,
            Action.CONNECT: self._connect,
            Action.JOIN: self._join,
            Action.REMOVE: self._remove,
            Action.SEND_ALL: lambda s: self._dispatch(s, sending.Send(None)),
            Action.SEND_TO: lambda s, some: self._dispatch(s, sending.Send(tuple(some))),
            Action.SEND_ASYNC_ALL: lambda s: self._dispatch(s, sending.SendAsync(None)),
            Action.SEND_ASYNC_TO: lambda s, some: self._dispatch(s, sending.SendAsync(tuple(some))),
            Action.WAIT: lambda s: self._call(s, sending.Wait()),
            Action.DEADLINE: lambda s: self._call(s, sending.Deadline(self.senders[s].driver.data.version)),
            Action.INTERRUPTED: lambda s: self._call(s, sending.Interrupted(self.senders[s].driver.data.version)),
            Action.ABANDON: lambda s: self._call(s, sending.Abandon()),
            Action.CLOSE_SENDER: lambda s: self._call(s, sending.Close()),
            Action.GIVE_UP: self._give_up, Action.NOTICE: self._notice,
            Action.ANSWER_HELLO: lambda *at: self._hear(at, lambda m: isinstance(m, Hello)),
            Action.ANSWER_ACK: lambda s, w, k, v: self._hear(
                (s, w, k), lambda m: isinstance(m, Ack) and m.version == v
            ),
            Action.ANSWER_REFUSAL: lambda s, w, k, v, kind: self._hear((s, w, k), refusal(v, kind)),
            Action.ANSWER_REJECTED: lambda s, w, k, kind: self._hear((s, w, k), refusal(0, kind)),
            Action.ANSWER_BYE: lambda *at: self._hear(at, lambda m: isinstance(m, Bye)),
            Action.HELLO_ARRIVED: lambda w, s, k: self._read((s, w, k), 0),
            Action.UPDATE_ARRIVED: lambda w, s, k, v: self._read((s, w, k), v),
            Action.LINK_DOWN: self._link_down,
            Action.APPLIED: self._apply,
            Action.REFUSED: self._decline,
            Action.BROKEN: self._break,
            Action.ANSWERED: self._answer, Action.CLOSE_RECEIVER: self._close, Action.CRASH_RECEIVER: self._crash,
            Action.LINK_FAILED: self._link_failed, Action.FAIL_RECEIVER: self._fail,
            Action.LOSE_MESSAGE: self._lose_update, Action.LOSE_ANSWER: self._lose_answer,
        }  # fmt: skip

    # ------------------------------------------------------------------------------------------ senders

    def _copy(self, _original: int, s: int) -> None:
        self.senders[s] = SenderPlayer()

    def _die(self, s: int) -> None:
        player = self.senders[s]
        self._dead.add(s)
        for version in list(player.driver._packed):
            player.driver._release(version)  # its memory is gone with it
        for step_gate in player.step_gates.values():
            step_gate.close()

    def _connect(self, s: int, _clock: int) -> None:
        assert self._step is not None
        node = self._step.senders[s - 1]
        assert node is not None
        self._call(s, sending.Connect(self.base + node[1]))

    def _call(self, s: int, event: sending.Event) -> None:
        self.senders[s].driver.take(event)

    def _join(self, s: int, w: int) -> None:
        player = self.senders[s]
        k = self._laid[s, w] = self._laid.get((s, w), 0) + 1
        ends = self.link_setup.create("policy")
        link_pair = self.link_setup.link_pair(ends, f"link {k} of sender {s} and worker {w}")
        step_gate = StepGate(ends.sender, link_pair, End.SENDER, (s, w, k))
        player.step_gates[player.driver._last_link + 1] = player.of[w] = step_gate
        if ends.cut is not None:
            self._cuts[s, w, k] = ends.cut
        place = (s, w, k)
        self._owners[place] = self.receivers[w]
        self.link_setup.listen(
            ends, lambda link: self._owners[place].add(StepGate(link, link_pair, End.RECEIVER, place))
        )
        player.driver.join(w, step_gate)

    def _remove(self, s: int, w: int) -> None:
        self.senders[s].driver.remove(w, "removed")

    def _dispatch(self, s: int, event: sending.Send | sending.SendAsync) -> None:
        packed = self.payloads.packed()
        self.senders[s].driver.dispatch(event, packed)
        self.payloads.release_packed(packed)

    def _give_up(self, s: int, w: int) -> None:
        driver = self.senders[s].driver
        driver.take(sending.LinkLost(w, driver.data.workers[w].link, "given up"))

    def _notice(self, s: int, w: int) -> None:
        player = self.senders[s]
        step_gate = player.of[w]
        self._await_end(step_gate, self.receivers[w].at(step_gate.place))
        own = player.driver.data.incarnation
        if any(isinstance(each.message, Bye) and each.message.incarnation == own for each in step_gate.waiting):
            raise RuleViolation(Rule.STATE, f"worker {w} said goodbye, which removes it; in the model it is only LOST")
        step_gate.report_end()
        player.driver.pump()

    def _hear(self, place: tuple[int, ...], wanted: Callable[[Message], bool]) -> None:
        s, w, k = place
        player = self.senders[s]
        step_gate = next(step_gate for step_gate in player.step_gates.values() if step_gate.place == (s, w, k))
        step_gate.let_through(self._await(step_gate, self.receivers[w].at((s, w, k)), wanted))
        player.driver.pump()

    # ---------------------------------------------------------------------------------------- receivers

    def _read(self, place: tuple[int, int, int], version: int) -> None:
        receiver, step_gate, other = self._far_end(place)
        step_gate.let_through(self._await(step_gate, other, update_or_hello(version)))
        receiver.driver.pump()

    def _link_down(self, w: int, s: int, k: int) -> None:
        receiver, step_gate, other = self._far_end((s, w, k))
        if not other.link_pair.closed and not other.link_pair.cut:
            other.link_pair.cut = True
            self._cuts[s, w, k]()
        owing = receiver.driver.machine.state is State.AWAITING_ACK and step_gate is receiver.current_link()
        bye = self._await_end(step_gate, other, or_goodbye=not owing)
        if bye is None:
            step_gate.report_end()
        else:
            step_gate.let_through(bye)
        receiver.driver.pump()

    def _apply(self, w: int) -> None:
        receiver = self.receivers[w]
        pending = receiver.driver.pending
        assert pending is not None
        update = pending.update
        if not self.payloads.intact(pending.on_host(), update.digest):
            raise RuleViolation(Rule.PINNED, f"version {update.version} changed before it was applied")
        receiver.served = (pending.on_host(), update.digest)
        self._decide(receiver, receiving.Applied(ack_of(update)))

    def _decline(self, w: int) -> None:
        receiver = self.receivers[w]
        pending = receiver.driver.pending
        assert pending is not None
        answer = refusal_of(pending.update, receiver.driver.data.fence)
        self._decide(receiver, receiving.Refused(answer))

    def _decide(self, receiver: ReceiverPlayer, event: receiving.Event) -> None:
        step_gate = receiver.current_link()
        if step_gate is not None:
            step_gate.holding = True
        receiver.driver.take(event)

    def _answer(self, w: int) -> None:
        receiver = self.receivers[w]
        step_gate = receiver.current_link()
        assert step_gate is not None
        step_gate.release()
        self.link_setup.until(
            lambda: receiver.driver.machine.state is not State.AWAITING_ACK,
            receiver.driver.pump,
            Rule.NEVER_BLOCKS,
            f"worker {w} does not send its answer",
        )

    def _break(self, w: int) -> None:
        self.receivers[w].driver.break_down("the swap broke", "")
        self.receivers[w].served = None

    def _link_failed(self, w: int, s: int, k: int) -> None:
        receiver, step_gate, _ = self._far_end((s, w, k))
        assert step_gate is receiver.current_link()
        assert receiver.driver.data.link is not None
        receiver.driver.take(receiving.LinkDown(receiver.driver.data.link, "no memory"))

    def _fail(self, w: int) -> None:
        self.receivers[w].driver.fail("an exception", "")

    def _close(self, w: int) -> None:
        self.receivers[w].driver.close()

    def _crash(self, w: int) -> None:
        old, new = self.receivers[w], ReceiverPlayer()
        self.receivers[w] = new
        old.gone = True
        for place in [place for place in self._owners if place[1] == w]:
            step_gate = old.at(place)
            if not self.senders[place[0]].driver.data.incarnation:
                self._owners[place] = new  # nothing was sent over it yet: the restarted worker finds it unused
                if step_gate is not None:
                    new.add(step_gate)
            elif step_gate is not None:
                step_gate.close()

    # ------------------------------------------------------------------------------------------ the network

    def _lose_update(self, s: int, w: int, k: int, version: int) -> None:
        _, step_gate, other = self._far_end((s, w, k))
        step_gate.lose(self._await(step_gate, other, update_or_hello(version)))

    def _lose_answer(self, s: int, w: int, k: int, version: int, kind: str) -> None:
        step_gate = next(step_gate for step_gate in self.senders[s].step_gates.values() if step_gate.place == (s, w, k))
        wanted = {
            "HELLO": lambda m: isinstance(m, Hello),
            "ACK": lambda m: isinstance(m, Ack) and m.version == version,
            "BYE": lambda m: isinstance(m, Bye),
        }.get(kind, refusal(version, kind))
        step_gate.lose(self._await(step_gate, self.receivers[w].at((s, w, k)), wanted))

    # ------------------------------------------------------------------------------------------ waiting

    def _far_end(self, place: tuple[int, int, int]) -> tuple[ReceiverPlayer, StepGate, StepGate]:
        """The receiver of a link, its end (waited for if necessary), and the sender's end."""
        s, w, _ = place
        other = next(step_gate for step_gate in self.senders[s].step_gates.values() if step_gate.place == place)
        receiver = self.receivers[w]
        self.link_setup.until(
            lambda: receiver.at(place) is not None,
            other.write if not other.dead else lambda: None,
            Rule.ARRIVES,
            "a message was sent, but the receiver's end never appeared",
        )
        step_gate = receiver.at(place)
        assert step_gate is not None
        return receiver, step_gate, other

    def _await(self, step_gate: StepGate, other: StepGate | None, wanted: Callable[[Message], bool]) -> Received:
        """The wanted message, once it has arrived at this end."""
        deadline = Deadline(self.link_setup.grace if step_gate.delivery.loses else self.link_setup.patience)
        while (found := step_gate.find(wanted)) is None:
            self._wait(step_gate, other)
            if deadline.passed and step_gate.find(wanted) is None:
                if step_gate.delivery.loses:
                    raise MessageLost
                self._fetch_everywhere()
                came = [type(each.message).__name__ for each in step_gate.waiting]
                raise RuleViolation(
                    Rule.ARRIVES,
                    f"a message in flight in the model never arrived at {step_gate.link_pair.name}; these did: {came}",
                )
        return found

    def _fetch_everywhere(self) -> None:
        """Report a message that arrived at another end than the one that it was sent to."""
        players: list[SenderPlayer | ReceiverPlayer] = [*self.senders.values(), *self.receivers.values()]
        for step_gate in [step_gate for player in players for step_gate in tuple(player.step_gates.values())]:
            step_gate.fetch()

    def _await_end(self, step_gate: StepGate, other: StepGate | None, or_goodbye: bool = False) -> Received | None:
        """Wait until this end has reported its death. Returns the goodbye instead, where that is enough."""
        deadline = Deadline(self.link_setup.patience)
        while step_gate.ended is None:
            if or_goodbye and (bye := step_gate.find(lambda message: isinstance(message, Bye))) is not None:
                return bye
            if deadline.passed:
                raise RuleViolation(
                    Rule.DEATH_REPORTED,
                    f"{step_gate.link_pair.name}, {step_gate.end.value}: it did not report the link's end",
                )
            self._wait(step_gate, other)
        return step_gate.find(lambda message: isinstance(message, Bye)) if or_goodbye else None

    def _wait(self, step_gate: StepGate, other: StepGate | None) -> None:
        if other is not None and not other.dead:
            other.write()
        self.link_setup.readable(step_gate, 0.005)
        step_gate.fetch()
        self.link_setup.watch.check()


def update_or_hello(version: int) -> Callable[[Message], bool]:
    """Matches that version on its way to a worker; version 0: the handshake."""
    if version:
        return lambda message: isinstance(message, Update) and message.version == version
    return lambda message: isinstance(message, Hello)


def refusal(version: int, kind: str) -> Callable[[Message], bool]:
    """Matches that refusal."""
    return lambda m: isinstance(m, Refusal) and m.version == version and m.kind.name == kind
