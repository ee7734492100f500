"""Real sender and receiver drivers over an adapter's links. Each method is one step and compares everything."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from functools import partial

from weightsync.clock import new_incarnation
from weightsync.engine.receiver_driver import ReceiverDriver
from weightsync.engine.sender_driver import SenderDriver
from weightsync.errors import ProtocolError
from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending
from weightsync.protocol._tables import State
from weightsync.testing.ends import Ends
from weightsync.testing.link_pair import End, EventKind, LinkPair
from weightsync.testing.link_recorder import LinkRecorder
from weightsync.testing.link_setup import LinkSetup
from weightsync.testing.oracle import ReceiverOracle, SenderOracle
from weightsync.testing.payloads import Payloads, ack_of, refusal_of
from weightsync.testing.rules import Rule, RuleViolation
from weightsync.transports.base import Link


class Sender:
    """A sender's driver, with the oracle of its expected state."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.driver = SenderDriver("policy")
        self.oracle = SenderOracle()
        #: Its links by number, and the newest link of each worker.
        self.links: dict[int, LinkRecorder] = {}
        self.of: dict[int, LinkRecorder] = {}
        self.gone = False


class Receiver:
    """A receiver's driver, with the oracle of its expected state."""

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.driver = ReceiverDriver("policy")
        self.oracle = ReceiverOracle(lambda link, index: index in self.links[link].failures)
        self.links: dict[int, LinkRecorder] = {}
        #: The weights that it serves, as they arrived. They must not change.
        self.served: tuple[memoryview, bytes] | None = None
        self.gone = False

    @property
    def over(self) -> bool:
        """Whether it has ended or is closed."""
        return self.gone or self.driver.machine.state is State.CLOSED


class Bench:
    """A sender, its workers, and their links.

    Every public method but `compare` is one step: it acts on the drivers, feeds the oracles with what the recorders
    saw, and compares everything with the expected state.

    Args:
        link_setup: makes the links and waits for them.
        nbytes: the size of each version's weights.
    """

    def __init__(self, link_setup: LinkSetup, nbytes: int = 1000) -> None:
        self.link_setup = link_setup
        self.payloads = Payloads(nbytes, link_setup.storage)
        self.senders: list[Sender] = []
        self.receivers: dict[int, Receiver] = {}
        self._all_receivers: list[Receiver] = []
        self._laid: dict[int, Ends] = {}
        #: Links that arrived for a worker, perhaps in a thread of the adapter, and were not given to it yet.
        self._come_up: deque[tuple[Receiver, LinkRecorder]] = deque()
        self.new_sender()

    @property
    def sender(self) -> Sender:
        """The newest sender."""
        return self.senders[-1]

    def new_sender(self) -> None:
        """Add a sender that has no workers yet."""
        self.senders.append(Sender("the sender" if not self.senders else f"sender {len(self.senders) + 1}"))

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Do one step, then compare."""
        self.link_setup.watch.steps.append(what)
        yield
        self.compare()

    # ----------------------------------------------------------------------------------------- comparing

    def compare(self) -> None:
        """Feed the oracles with what was seen, and compare everything with them."""
        self.link_setup.watch.check()
        self._feed_oracles()
        for sender in self.senders:
            if not sender.gone:
                self._require_no_difference(sender.name, sender.oracle.difference(sender.driver))
                self._compare_sent(sender.name, sender.links, sender.oracle.sent)
        for receiver in self.receivers.values():
            if not receiver.gone:
                self._require_no_difference(f"worker {receiver.worker}", receiver.oracle.difference(receiver.driver))
                self._compare_sent(f"worker {receiver.worker}", receiver.links, receiver.oracle.sent)
        self.payloads.scribble()
        self._check_served_payloads()

    def _feed_oracles(self) -> None:
        log, self.link_setup.watch.log = self.link_setup.watch.log, []
        for seen in log:
            oracle, number = self._owner(seen.recorder)
            if seen.kind is EventKind.CAME and seen.message is not None:
                oracle.came(number, seen.message)
            else:
                oracle.ended(number)
        for sender in self.senders:
            sender.oracle.settle()

    def _owner(self, recorder: object) -> tuple[SenderOracle | ReceiverOracle, int]:
        owners: list[Sender | Receiver] = [*self.senders, *self._all_receivers]
        return next((o.oracle, number) for o in owners for number, each in o.links.items() if each is recorder)

    def _require_no_difference(self, who: str, difference: str) -> None:
        if difference:
            raise RuleViolation(Rule.STATE, f"of {who}, {difference}")

    def _compare_sent(
        self, who: str, links: dict[int, LinkRecorder], sent: dict[int, list[tuple[str, int, int]]]
    ) -> None:
        for number, recorder in links.items():
            if recorder.attempts != sent[number]:
                raise RuleViolation(
                    Rule.STATE, f"{who} sent {recorder.attempts} over link {number}, but must send {sent[number]}"
                )

    def _check_served_payloads(self) -> None:
        for receiver in self.receivers.values():
            if receiver.served is not None and not self.payloads.intact(*receiver.served):
                what = f"what worker {receiver.worker} serves was overwritten before it acked a newer version"
                raise RuleViolation(Rule.PINNED, f"{what}: its buffer was not pinned")

    # ------------------------------------------------------------------------------------ the sender's steps

    def join(self, worker: int, sender: Sender | None = None) -> None:
        """Let a worker join, or rejoin, on a new link."""
        sender = sender or self.sender
        with self.step(f"worker {worker} joins {sender.name} on a new link"):
            ends = self.link_setup.create("policy")
            link_pair = self.link_setup.link_pair(ends, f"the link of worker {worker}")
            recorder = LinkRecorder(ends.sender, link_pair, End.SENDER)
            number = sender.driver._last_link + 1
            sender.links[number] = sender.of[worker] = recorder
            self._laid[id(recorder)] = ends
            sender.oracle.join(worker, number, recorder.delivery.loses)
            receiver = self.receivers.get(worker)
            if receiver is None or receiver.over:
                receiver = self.receivers[worker] = Receiver(worker)
                self._all_receivers.append(receiver)
            self.link_setup.listen(ends, partial(self._accept, receiver, link_pair))
            sender.driver.join(worker, recorder)
            self._take_links()

    def _accept(self, receiver: Receiver, link_pair: LinkPair, link: Link) -> None:
        self._come_up.append((receiver, LinkRecorder(link, link_pair, End.RECEIVER)))

    def _take_links(self) -> None:
        """Give each worker the links that arrived for it, in this thread, since drivers belong to one thread."""
        while self._come_up:
            receiver, recorder = self._come_up.popleft()
            if receiver.driver.machine.state is State.CLOSED:
                recorder.close()
                continue
            number = receiver.driver._last_link + 1
            receiver.links[number] = recorder
            receiver.oracle.open.add(number)
            receiver.driver.add_link(recorder)

    def connect(self, sender: Sender | None = None, incarnation: int | None = None) -> None:
        """Connect the sender over all its links."""
        sender = sender or self.sender
        event = sending.Connect(new_incarnation(0) if incarnation is None else incarnation)
        with self.step(f"{sender.name} says Hello on every link"):
            self._take(sender, event)

    def _take(self, sender: Sender, event: sending.Event) -> None:
        sender.oracle.take(event)
        sender.driver.take(event)

    def send(self, targets: tuple[int, ...] | None = None, sender: Sender | None = None) -> int:
        """Dispatch the sender's next version."""
        sender = sender or self.sender
        event = sending.SendAsync(targets)
        with self.step(f"{sender.name} sends version {sender.driver.data.version + 1} to {targets or 'all'}"):
            packed = self.payloads.packed()
            sender.oracle.take(event)
            version = sender.driver.dispatch(event, packed)
            self.payloads.release_packed(packed)
        return version

    def repeat(self, worker: int, back: int = 1) -> None:
        """Send an update again, as a network that duplicates messages would."""
        sender, recorder = self.sender, self.sender.of[worker]
        message = recorder.updates[-back]
        with self.step(f"version {message.version} is sent to worker {worker} again"):
            number = next(number for number, each in sender.links.items() if each is recorder)
            sender.oracle.sent[number].append(("Update", message.incarnation, message.version))
            recorder.send(message, self.payloads.again(message.digest))

    def abandon(self) -> None:
        """Abandon the sender's outstanding version."""
        with self.step(f"{self.sender.name} abandons the outstanding version"):
            self._take(self.sender, sending.Abandon())

    def wait(self) -> None:
        """Wait for the outstanding version; the wait ends here once every worker has answered."""
        with self.step(f"a caller waits for {self.sender.name}"):
            self._take(self.sender, sending.Wait())

    def deadline(self) -> None:
        """Let the deadline of the wait pass."""
        with self.step("the deadline of the wait passes"):
            self._take(self.sender, sending.Deadline(self.sender.driver.data.version))

    def remove(self, worker: int) -> None:
        """Remove a worker."""
        with self.step(f"worker {worker} is removed"):
            self.sender.oracle.remove(worker, "removed")
            self.sender.driver.remove(worker, "removed")

    def close_sender(self) -> None:
        """Close the sender."""
        with self.step(f"{self.sender.name} closes"):
            self._take(self.sender, sending.Close())

    def hear(self, sender: Sender | None = None) -> None:
        """Process all messages that the workers have sent to the sender."""
        sender = sender or self.sender
        with self.step(f"{sender.name} processes what has arrived"):
            for recorder in list(sender.links.values()):
                self.link_setup.until_arrived(recorder, lambda: self._pump_sender(sender), self._flush)
            self._pump_sender(sender)

    def _pump_sender(self, sender: Sender) -> None:
        sender.driver.pump()
        self.link_setup.watch.check()

    # ---------------------------------------------------------------------------------- the receivers' steps

    def receive(self, worker: int) -> None:
        """Receive all that was sent to a worker, without applying it."""
        receiver = self.receivers[worker]
        with self.step(f"worker {worker} processes what has arrived"):
            for link_pair in [
                recorder.link_pair for sender in self.senders for w, recorder in sender.of.items() if w == worker
            ]:
                self.link_setup.until_all_arrived(
                    link_pair, End.RECEIVER, lambda: self._pump_receiver(receiver), self._flush
                )
            self._pump_receiver(receiver)

    def _pump_receiver(self, receiver: Receiver) -> None:
        self._take_links()
        try:
            receiver.driver.pump()
        except ProtocolError as error:
            self.link_setup.watch.check()
            raise RuleViolation(Rule.STATE, f"worker {receiver.worker} closed its link: {error}") from error
        self.link_setup.watch.check()

    def _flush(self, link_pair: LinkPair) -> None:
        owners: list[Sender | Receiver] = [*self.senders, *self._all_receivers]
        for owner in owners:
            for recorder in list(owner.links.values()):  # a link that fails to flush is closed
                if recorder.link_pair is link_pair and not recorder.dead and not owner.gone:
                    self.link_setup.flush(recorder)

    def apply(self, worker: int) -> None:
        """Apply a worker's pending update, and answer it."""
        receiver = self.receivers[worker]
        with self.step(f"worker {worker} applies its pending update"):
            pending = receiver.driver.pending
            assert pending is not None
            if not self.payloads.intact(pending.on_host(), pending.update.digest):
                raise RuleViolation(
                    Rule.PINNED, f"version {pending.update.version} changed between its arrival and its use"
                )
            receiver.served = (pending.on_host(), pending.update.digest)
            self._decide(receiver, receiving.Applied(ack_of(pending.update)))

    def refuse(self, worker: int) -> None:
        """Refuse a worker's pending update."""
        receiver = self.receivers[worker]
        with self.step(f"worker {worker} refuses its pending update"):
            pending = receiver.driver.pending
            assert pending is not None
            answer = refusal_of(pending.update, receiver.driver.data.fence)
            self._decide(receiver, receiving.Refused(answer))

    def _decide(self, receiver: Receiver, event: receiving.Applied | receiving.Refused) -> None:
        receiver.oracle.take(event)
        receiver.driver.take(event)
        self.link_setup.until(
            lambda: receiver.driver.machine.state is not State.AWAITING_ACK,
            receiver.driver.pump,
            Rule.NEVER_BLOCKS,
            f"worker {receiver.worker} does not send its answer",
        )
        receiver.oracle.answered()

    def close_receiver(self, worker: int) -> None:
        """Close a worker's receiver, with a goodbye."""
        receiver = self.receivers[worker]
        with self.step(f"worker {worker} closes"):
            self._take_links()
            receiver.oracle.take(receiving.Close())
            receiver.oracle.close_all()
            receiver.driver.close()

    # ------------------------------------------------------------------------------------------------- losses

    def lose_receiver(self, worker: int) -> None:
        """End a worker without a goodbye, like a killed process."""
        receiver = self.receivers[worker]
        with self.step(f"worker {worker} ends without a goodbye"):
            self._take_links()
            receiver.gone = True
            for recorder in receiver.links.values():
                recorder.close()

    def lose_sender(self) -> None:
        """End the sender without a goodbye."""
        sender = self.sender
        with self.step(f"{sender.name} ends without a goodbye"):
            sender.gone = True
            for version in list(sender.driver._packed):
                sender.driver._release(version)  # its memory is gone with it
            for recorder in sender.links.values():
                recorder.close()

    def cut(self, worker: int) -> None:
        """Cut the connection between the sender and a worker."""
        recorder = self.sender.of[worker]
        with self.step(f"the link of worker {worker} is cut"):
            cut = self._laid[id(recorder)].cut
            assert cut is not None
            recorder.link_pair.cut = True
            cut()

    def sender_notices(self, worker: int) -> None:
        """Wait until the sender notices that a worker's link is dead."""
        sender, recorder = self.sender, self.sender.of[worker]
        with self.step(f"{sender.name} notices that the link of worker {worker} is dead"):
            self.link_setup.until_dead(recorder, lambda: self._pump_sender(sender))

    def receiver_notices(self, worker: int) -> None:
        """Wait until a worker notices that its link is dead."""
        receiver = self.receivers[worker]
        with self.step(f"worker {worker} notices that its link is dead"):
            self._take_links()
            for recorder in list(receiver.links.values()):
                if not recorder.dead:
                    self.link_setup.until_dead(recorder, lambda: self._pump_receiver(receiver))

    # --------------------------------------------------------------------------------------------------- ending

    def sync(self, *workers: int) -> None:
        """Have the workers receive and apply what was sent, and the sender process their answers."""
        for worker in workers:
            self.receive(worker)
            if self.receivers[worker].driver.pending is not None:
                self.apply(worker)
        self.hear()

    def deliver(self, *workers: int, targets: tuple[int, ...] | None = None) -> None:
        """Send a version, have the workers apply it, and wait for the report."""
        self.send(targets)
        self.sync(*workers)
        self.wait()

    def finish(self) -> None:
        """Close everything that is left; every buffer must then be free."""
        self.link_setup.watch.steps.append("everything is closed")
        self._take_links()
        for receiver in self.receivers.values():
            receiver.served = None
            if not receiver.gone:
                receiver.driver.close()
        for sender in self.senders:
            if not sender.gone:
                sender.driver.take(sending.Close())
        self.link_setup.watch.check()
        # A link may arrive only now. A caller that sends over it waits until it is closed.
        self.payloads.all_free(self.link_setup, self._close_late_links)

    def _close_late_links(self) -> None:
        while self._come_up:
            _, recorder = self._come_up.popleft()
            recorder.close()


def bench_of(link_setup: LinkSetup, workers: int = 1) -> Bench:
    """A bench with a sender and its workers, after their handshakes."""
    bench = Bench(link_setup)
    for worker in range(workers):
        bench.join(worker)
    bench.connect()
    for worker in range(workers):
        bench.receive(worker)
    bench.hear()
    return bench
