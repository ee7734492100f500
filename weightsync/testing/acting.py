"""The actions of the model, done to real drivers over an adapter's links. Names and arguments are the model's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending
from weightsync.protocol._actions import Action
from weightsync.protocol._tables import RefusalKind, State
from weightsync.protocol.messages import Ack, Bye, Hello, Message, Refusal
from weightsync.testing.cable import End
from weightsync.testing.gate import Gate
from weightsync.testing.projecting import ReceiverPlayer, SenderPlayer
from weightsync.testing.rules import Breach, Rule
from weightsync.testing.troupe import Troupe, letter, refusal


class Acting(Troupe):
    """What the senders, the receivers and the network of a path can do."""

    def acts(self) -> Mapping[str, Callable[..., None]]:
        """By name."""
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
            Action.DEADLINE: lambda s: self._call(s, sending.Deadline(self._senders[s].driver.data.version)),
            Action.INTERRUPTED: lambda s: self._call(s, sending.Interrupted(self._senders[s].driver.data.version)),
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
            Action.LOSE_LETTER: self._lose_letter, Action.LOSE_ANSWER: self._lose_answer,
        }  # fmt: skip

    # ------------------------------------------------------------------------------------------ senders

    def _copy(self, _original: int, s: int) -> None:
        self._senders[s] = SenderPlayer()

    def _die(self, s: int) -> None:
        player = self._senders[s]
        self._dead.add(s)
        for version in list(player.driver._packed):
            player.driver._release(version)  # it died with its memory
        for gate in player.gates.values():
            gate.close()

    def _connect(self, s: int, _clock: int) -> None:
        assert self._step is not None
        node = self._step.senders[s - 1]
        assert node is not None
        self._call(s, sending.Connect(self._base + node[1]))

    def _call(self, s: int, event: sending.Event) -> None:
        self._senders[s].driver.take(event)

    def _join(self, s: int, w: int) -> None:
        player = self._senders[s]
        k = self._laid[s, w] = self._laid.get((s, w), 0) + 1
        ends = self.stage.lay("policy")
        cable = self.stage.cable(ends, f"link {k} of sender {s} and worker {w}")
        gate = Gate(ends.sender, cable, End.SENDER, (s, w, k))
        player.gates[player.driver._last_link + 1] = player.of[w] = gate
        if ends.cut is not None:
            self._cuts[s, w, k] = ends.cut
        place = (s, w, k)
        self._owners[place] = self._receivers[w]
        self.stage.listen(ends, lambda link: self._owners[place].add(Gate(link, cable, End.RECEIVER, place)))
        player.driver.join(w, gate)

    def _remove(self, s: int, w: int) -> None:
        self._senders[s].driver.remove(w, "removed")

    def _dispatch(self, s: int, event: sending.Send | sending.SendAsync) -> None:
        packed = self.payloads.packed()
        self._senders[s].driver.dispatch(event, packed)
        self.payloads.handed_over(packed)

    def _give_up(self, s: int, w: int) -> None:
        driver = self._senders[s].driver
        driver.take(sending.LinkLost(w, driver.data.roll[w].link, "given up"))

    def _notice(self, s: int, w: int) -> None:
        player = self._senders[s]
        gate = player.of[w]
        self._await_end(gate, self._receivers[w].at(gate.place))
        own = player.driver.data.incarnation
        if any(isinstance(each.message, Bye) and each.message.incarnation == own for each in gate.waiting):
            raise Breach(Rule.STATE, f"worker {w} said goodbye, which takes it off the roll, and is only to be LOST")
        gate.tell_end()
        player.driver.pump()

    def _hear(self, place: tuple[int, ...], wanted: Callable[[Message], bool]) -> None:
        s, w, k = place
        player = self._senders[s]
        gate = next(gate for gate in player.gates.values() if gate.place == (s, w, k))
        gate.let_through(self._await(gate, self._receivers[w].at((s, w, k)), wanted))
        player.driver.pump()

    # ---------------------------------------------------------------------------------------- receivers

    def _read(self, place: tuple[int, int, int], version: int) -> None:
        receiver, gate, other = self._far_end(place)
        gate.let_through(self._await(gate, other, letter(version)))
        receiver.driver.pump()

    def _link_down(self, w: int, s: int, k: int) -> None:
        receiver, gate, other = self._far_end((s, w, k))
        if not other.cable.closed and not other.cable.cut:
            other.cable.cut = True
            self._cuts[s, w, k]()
        owing = receiver.driver.machine.state is State.AWAITING_ACK and gate is receiver.in_force()
        bye = self._await_end(gate, other, or_goodbye=not owing)
        if bye is None:
            gate.tell_end()
        else:
            gate.let_through(bye)
        receiver.driver.pump()

    def _apply(self, w: int) -> None:
        receiver = self._receivers[w]
        pending = receiver.driver.pending
        assert pending is not None
        update = pending.update
        if not self.payloads.intact(pending.payload, update.digest):
            raise Breach(Rule.PINNED, f"version {update.version} changed between its arrival and its use")
        receiver.served = (pending.payload, update.digest)
        answer = Ack(
            model_id=update.model_id, incarnation=update.incarnation, version=update.version, digest=update.digest
        )
        self._decide(receiver, receiving.Applied(answer))

    def _decline(self, w: int) -> None:
        receiver = self._receivers[w]
        pending = receiver.driver.pending
        assert pending is not None
        update = pending.update
        answer = Refusal(
            model_id=update.model_id,
            incarnation=update.incarnation,
            version=update.version,
            kind=RefusalKind.REFUSED,
            reason="it does not fit",
            fence=receiver.driver.data.fence,
        )
        self._decide(receiver, receiving.Refused(answer))

    def _decide(self, receiver: ReceiverPlayer, event: receiving.Event) -> None:
        gate = receiver.in_force()
        if gate is not None:
            gate.holding = True
        receiver.driver.take(event)

    def _answer(self, w: int) -> None:
        receiver = self._receivers[w]
        gate = receiver.in_force()
        assert gate is not None
        gate.release()
        self.stage.until(
            lambda: receiver.driver.machine.state is not State.AWAITING_ACK,
            receiver.driver.pump,
            Rule.NEVER_BLOCKS,
            f"the answer of worker {w} does not leave",
        )

    def _break(self, w: int) -> None:
        self._receivers[w].driver.break_down("the swap broke", "")
        self._receivers[w].served = None

    def _link_failed(self, w: int, s: int, k: int) -> None:
        receiver, gate, _ = self._far_end((s, w, k))
        assert gate is receiver.in_force()
        assert receiver.driver.data.link is not None
        receiver.driver.take(receiving.LinkDown(receiver.driver.data.link, "no memory"))

    def _fail(self, w: int) -> None:
        self._receivers[w].driver.fail("an exception", "")

    def _close(self, w: int) -> None:
        self._receivers[w].driver.close()

    def _crash(self, w: int) -> None:
        old, new = self._receivers[w], ReceiverPlayer()
        self._receivers[w] = new
        old.gone = True
        for place in [place for place in self._owners if place[1] == w]:
            gate = old.at(place)
            if not self._senders[place[0]].driver.data.incarnation:
                self._owners[place] = new  # nothing was said over it yet: who starts again finds it as it is
                if gate is not None:
                    new.add(gate)
            elif gate is not None:
                gate.close()

    # ------------------------------------------------------------------------------------------ the network

    def _lose_letter(self, s: int, w: int, k: int, version: int) -> None:
        _, gate, other = self._far_end((s, w, k))
        gate.lose(self._await(gate, other, letter(version)))

    def _lose_answer(self, s: int, w: int, k: int, version: int, kind: str) -> None:
        gate = next(gate for gate in self._senders[s].gates.values() if gate.place == (s, w, k))
        wanted = {
            "HELLO": lambda m: isinstance(m, Hello),
            "ACK": lambda m: isinstance(m, Ack) and m.version == version,
            "BYE": lambda m: isinstance(m, Bye),
        }.get(kind, refusal(version, kind))
        gate.lose(self._await(gate, self._receivers[w].at((s, w, k)), wanted))
