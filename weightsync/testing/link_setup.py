"""Defines scenarios, makes an adapter's links for them, and waits for the links up to the kit's patience."""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from weightsync.clock import Deadline
from weightsync.protocol._tables import Delivery
from weightsync.protocol.messages import Bye, Message
from weightsync.testing.coverage import Coverage
from weightsync.testing.ends import Ends, Factory
from weightsync.testing.link_pair import End, LinkPair, Watch, words
from weightsync.testing.link_recorder import LinkRecorder
from weightsync.testing.rules import Rule, RuleViolation
from weightsync.transports.base import Link, Waker, wait
from weightsync.transports.buffers import Buffer, Storage

#: The unreachable scenarios that a scenario of links alone needs to know: none.
_NOTHING: Mapping[str, str] = {}
#: Seconds in which a link that may lose messages can deliver those that it does not lose.
_GRACE = 0.02
#: The number of reads that find nothing after which a waitable must have stopped being readable.
_SPURIOUS = 50


class LinkSetup:
    """The connections of one scenario.

    Args:
        factory: makes fresh connections.
        patience: seconds to wait for an expected event before it counts as missing.
        storage: where payloads are stored.
        unreachable: the scenarios that the adapter declares unreachable, with its reasons.
        coverage: records which edges of the model's graph were replayed.
    """

    def __init__(
        self,
        factory: Factory,
        patience: float,
        storage: Storage = Storage.SEGMENTS,
        unreachable: Mapping[str, str] = _NOTHING,
        coverage: Coverage | None = None,
    ) -> None:
        self._factory = factory
        self.patience = patience
        self.grace = _GRACE
        self.unreachable = unreachable
        self.coverage = coverage or Coverage()
        self.storage = storage
        self.watch = Watch()
        self._ends: list[Ends] = []
        self._accepted: list[Link] = []
        self._stops: list[Callable[[], None]] = []
        self._waker = Waker()

    def create(self, model_id: str) -> Ends:
        """Make a new connection."""
        return self.adopt(self._factory(model_id))

    def adopt(self, ends: Ends) -> Ends:
        """Close these ends too when the scenario is over."""
        self._ends.append(ends)
        return ends

    def listen(self, ends: Ends, accept: Callable[[Link], None]) -> None:
        """Call ``accept`` with the receiver's end once it exists, until the scenario is over."""

        def accepted(link: Link) -> None:
            self._accepted.append(link)
            accept(link)

        self._stops.append(ends.listen(accepted))

    def link_pair(self, ends: Ends, name: str) -> LinkPair:
        """The connection between the ends."""
        return LinkPair(self.watch, name, ends.sender.delivery)

    def clear(self) -> None:
        """Close every link, dispose of every connection."""
        while self._stops:
            self._stops.pop()()
        ends, self._ends = self._ends, []
        accepted, self._accepted = self._accepted, []
        for link in [*(each.sender for each in ends), *accepted]:
            link.close()
        for each in reversed(ends):
            each.dispose()

    def tear_down(self) -> None:
        """End the scenario."""
        self.clear()
        self._waker.close()

    # ------------------------------------------------------------------------------------------- waiting

    def until(self, done: Callable[[], bool], act: Callable[[], object], rule: Rule, what: str) -> None:
        """Call ``act`` until ``done`` is true.

        Raises:
            RuleViolation: patience ran out, which breaks ``rule``.
        """
        deadline = Deadline(self.patience)
        while not done():
            if deadline.passed:
                raise RuleViolation(rule, f"{what} within {self.patience:g} seconds")
            act()
            self.watch.check()
            _yield_to_threads()

    def until_arrived(
        self, recorder: LinkRecorder, pump: Callable[[], None], flush: Callable[[LinkPair], None]
    ) -> None:
        """Pump until all that was sent to this end has arrived at it."""
        self._pump_until_arrived(recorder.link_pair, recorder.end, recorder, pump, lambda: flush(recorder.link_pair))

    def until_all_arrived(
        self, link_pair: LinkPair, end: End, pump: Callable[[], None], flush: Callable[[LinkPair], None]
    ) -> None:
        """Pump until all that was sent to that end has arrived at it."""
        self._pump_until_arrived(link_pair, end, None, pump, lambda: flush(link_pair))

    def _pump_until_arrived(
        self,
        link_pair: LinkPair,
        end: End,
        recorder: LinkRecorder | None,
        pump: Callable[[], None],
        flush: Callable[[], None],
    ) -> None:
        deadline = Deadline(_GRACE if link_pair.delivery.loses else self.patience)
        while self._messages_due(link_pair, end):
            flush()
            before = len(link_pair.arrived[end])
            readable = recorder is None or self.readable(recorder, min(deadline.remaining or 0.0, 0.05))
            pump()
            if recorder is None and self._messages_due(link_pair, end):
                _yield_to_threads()
            if len(link_pair.arrived[end]) > before and not readable and deadline.passed:
                raise RuleViolation(
                    Rule.WAKES, f"{end.value} of {link_pair.name} had a message to receive, but no readable waitable"
                )
            if deadline.passed and self._messages_due(link_pair, end):
                if link_pair.delivery.loses:
                    return
                missing = ", ".join(words(each.message) for each in link_pair.in_flight[end])
                raise RuleViolation(Rule.ARRIVES, f"{missing} never arrived at {link_pair.name}, {end.value}")

    def _messages_due(self, link_pair: LinkPair, end: End) -> list[Message]:
        """The messages that must still arrive at that end. A goodbye may be lost with its link."""
        if link_pair.cut or end in link_pair.closed or end in link_pair.dead:
            return []
        if link_pair.closed and not link_pair.met:
            return []
        flying = [each.message for each in link_pair.in_flight[end] if not each.given_up]
        return [message for message in flying if not isinstance(message, Bye)] if link_pair.closed else flying

    def until_dead(self, recorder: LinkRecorder, pump: Callable[[], None]) -> None:
        """Pump until this end has reported its death, woken by its waitables alone."""
        deadline = Deadline(self.patience)
        while not recorder.dead:
            if not self.readable(recorder, deadline.remaining or 0.0):
                pump()
                if recorder.dead:
                    raise RuleViolation(Rule.WAKES, f"{recorder.end.value} was dead, but no waitable became readable")
                raise RuleViolation(
                    Rule.DEATH_REPORTED, f"{recorder.end.value} reported no death within {self.patience:g} seconds"
                )
            pump()
            self.watch.check()
            if deadline.passed and not recorder.dead:
                raise RuleViolation(
                    Rule.DEATH_REPORTED, f"{recorder.end.value} reported no death within {self.patience:g} seconds"
                )

    def until_written(self, recorder: LinkRecorder, read: Callable[[], object]) -> None:
        """Have an end write whenever one of its own descriptors is ready, while the other end is read."""
        deadline, asked = Deadline(self.patience), True
        while not (asked and recorder.flush()):
            if deadline.passed:
                what = "has something to write, but neither wants_write() nor a waitable says when it can"
                raise RuleViolation(Rule.WAKES, f"{recorder.end.value} {what}")
            read()
            asked = bool(wait(self._waker, [recorder], 0.02))

    def readable(self, recorder: LinkRecorder, seconds: float) -> bool:
        """Whether one of the end's waitables becomes readable within that time."""
        return bool(wait(self._waker, [recorder], seconds)) if recorder.waitables() else recorder.dead

    def flush(self, recorder: LinkRecorder) -> None:
        """Have an end write what it can; reading finds its death."""
        recorder.write()

    def quiet(self, recorder: LinkRecorder) -> None:
        """Require that no waitable stays readable once there is nothing to receive."""
        for _ in range(_SPURIOUS):
            poller = select.poll()
            for fd in recorder.waitables():
                poller.register(fd, select.POLLIN)
            if not poller.poll(0):
                return
            recorder.flush()
            if recorder.receive():
                return
        what = f"{recorder.end.value} reports something to receive, but {_SPURIOUS} reads found nothing"
        raise RuleViolation(Rule.QUIET, what)

    def until_free(self, buffers: Sequence[Buffer], what: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Require that every buffer becomes free; ``what`` describes those that do not."""
        held = [buffer for buffer in buffers if buffer.pinned]

        def act() -> None:
            meanwhile()
            wait(self._waker, [], 0.01)

        rule, what = Rule.UNPINNED, f"{len(held)} buffers {what}"
        self.until(lambda: not any(buffer.pinned for buffer in held), act, rule, what)


def _yield_to_threads() -> None:
    """Let the transport's own threads run: a loop without a pause would hold the GIL."""
    select.poll().poll(1)


class Ability(Enum):
    """What an adapter may be able to do beyond the contract of links."""

    CUT = "Ends.cut"
    ANOTHER = "Ends.another"

    def of(self, ends: Ends) -> bool:
        """Whether these ends can do it."""
        return (ends.cut if self is Ability.CUT else ends.another) is not None


@dataclass(frozen=True, slots=True)
class Scenario:
    """Something that runs over an adapter's links."""

    name: str
    play: Callable[[LinkSetup], None]
    needs: Ability | None = None
    #: Whether it can run where messages may be lost.
    over_losses: bool = False

    def beside(self, delivery: Delivery) -> str:
        """Why it does not apply to a delivery; empty if it applies."""
        if delivery.loses and not self.over_losses:
            return f"links of delivery {delivery.name} may lose messages and need not report deaths"
        return ""
