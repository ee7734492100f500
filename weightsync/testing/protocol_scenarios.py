"""Scenarios of the protocol: real drivers over an adapter's links, compared with the pure halves at each step."""

from __future__ import annotations

from weightsync.clock import new_incarnation
from weightsync.testing.bench import Bench, bench_of
from weightsync.testing.link_setup import Ability, LinkSetup, Scenario


def handshake(link_setup: LinkSetup) -> None:
    """A Hello is sent and answered."""
    bench_of(link_setup, workers=3).finish()


def updates(link_setup: LinkSetup) -> None:
    """Several versions are sent, to all workers and to some."""
    bench = bench_of(link_setup, workers=2)
    for targets in (None, (0,), (1,), None, (0, 1)):
        bench.deliver(*(targets or (0, 1)), targets=targets)
    bench.finish()


def the_first_update_with_the_handshake(link_setup: LinkSetup) -> None:
    """Hello and update are sent together, before the worker has read anything."""
    bench = Bench(link_setup)
    bench.join(0)
    bench.connect()
    bench.deliver(0)
    bench.finish()


def refusal(link_setup: LinkSetup) -> None:
    """A version is refused, and the next one applied."""
    bench = bench_of(link_setup)
    bench.send()
    bench.receive(0)
    bench.refuse(0)
    bench.hear()
    bench.wait()
    bench.deliver(0)
    bench.finish()


def duplicate(link_setup: LinkSetup) -> None:
    """An update arrives again, while it is pending and after it was applied."""
    bench = bench_of(link_setup)
    bench.send()
    bench.repeat(0)
    bench.receive(0)
    bench.apply(0)
    bench.hear()
    bench.repeat(0)
    bench.receive(0)
    bench.hear()
    bench.wait()
    bench.finish()


def stale(link_setup: LinkSetup) -> None:
    """An older update arrives again after a newer one was applied."""
    bench = bench_of(link_setup)
    for _ in range(2):
        bench.deliver(0)
    bench.repeat(0, back=2)
    bench.receive(0)
    bench.hear()
    bench.deliver(0)
    bench.finish()


def newer_overtakes(link_setup: LinkSetup) -> None:
    """A newer version arrives before the older one is applied, which is answered SUPERSEDED."""
    bench = bench_of(link_setup)
    for _ in range(4):
        bench.send()
        bench.abandon()
        bench.receive(0)
    bench.send()
    bench.receive(0)
    bench.hear()
    bench.receive(0)
    bench.sync(0)
    bench.sync(0)
    bench.wait()
    bench.finish()


def deadline(link_setup: LinkSetup) -> None:
    """The deadline passes before the answer arrives, which still counts."""
    bench = bench_of(link_setup)
    bench.send()
    bench.wait()
    bench.deadline()
    bench.sync(0)
    bench.wait()
    bench.finish()


def takeover(link_setup: LinkSetup) -> None:
    """A newer sender takes the worker over while a version is pending; the older sender is fenced."""
    bench = bench_of(link_setup)
    bench.send()
    bench.receive(0)
    older = bench.sender
    bench.new_sender()
    bench.join(0)
    bench.connect(incarnation=new_incarnation(older.driver.data.incarnation))
    bench.send()
    bench.receive(0)
    bench.hear(older)
    bench.sync(0)
    bench.wait()
    bench.finish()


def fenced(link_setup: LinkSetup) -> None:
    """An older sender connects after a newer one: it is refused with the fence, and nothing else changes."""
    bench = bench_of(link_setup)
    newer = bench.sender
    bench.deliver(0)
    bench.new_sender()
    bench.join(0)
    bench.connect(incarnation=newer.driver.data.incarnation - 1)
    bench.send()
    bench.receive(0)
    bench.hear()
    bench.wait()
    bench.send(sender=newer)
    bench.receive(0)
    bench.apply(0)
    bench.hear(newer)
    bench.finish()


def the_sender_says_bye(link_setup: LinkSetup) -> None:
    """The sender closes while an update is in flight, and a new sender continues."""
    bench = bench_of(link_setup, workers=2)
    bench.send()
    bench.sync(0)
    bench.close_sender()
    _another_sender_goes_on(bench)


def _another_sender_goes_on(bench: Bench) -> None:
    """Both workers notice that their sender has ended, and a new one serves them."""
    for worker in (0, 1):
        bench.receiver_notices(worker)
    bench.new_sender()
    for worker in (0, 1):
        bench.join(worker)
    bench.connect()
    bench.deliver(0, 1)
    bench.finish()


def a_worker_says_bye(link_setup: LinkSetup) -> None:
    """A worker closes while it owes an answer: its goodbye removes it, and the other worker is served."""
    bench = bench_of(link_setup, workers=2)
    bench.send()
    bench.receive(0)
    bench.close_receiver(0)
    bench.sync(1)
    bench.sender_notices(0)
    bench.wait()
    bench.deliver(1)
    bench.finish()


def an_idle_worker_says_bye(link_setup: LinkSetup) -> None:
    """A worker closes while nothing is in flight: its goodbye removes it."""
    bench = bench_of(link_setup, workers=2)
    bench.close_receiver(0)
    bench.sender_notices(0)
    bench.deliver(1)
    bench.finish()


def a_worker_is_lost(link_setup: LinkSetup) -> None:
    """A worker that owes an answer ends without a goodbye. It is LOST, rejoins on a new link, and catches up."""
    bench = bench_of(link_setup, workers=2)
    bench.send()
    bench.receive(0)
    bench.lose_receiver(0)
    bench.sync(1)
    bench.sender_notices(0)
    bench.wait()
    bench.join(0)
    bench.sync(0)
    bench.deliver(0, 1)
    bench.finish()


def a_worker_comes_back(link_setup: LinkSetup) -> None:
    """A worker gets a new link while its old one is in use, and catches up over the new one."""
    bench = bench_of(link_setup)
    bench.deliver(0)
    bench.send()
    bench.receive(0)
    bench.join(0)
    bench.receive(0)
    bench.sync(0)
    bench.wait()
    bench.deliver(0)
    bench.finish()


def the_sender_is_lost(link_setup: LinkSetup) -> None:
    """The sender ends without a goodbye: its workers notice, and keep serving their version."""
    bench = bench_of(link_setup, workers=2)
    bench.send()
    bench.sync(0)
    bench.lose_sender()
    _another_sender_goes_on(bench)


def removal(link_setup: LinkSetup) -> None:
    """A worker is removed while it owes an answer: it is notified, and may join again."""
    bench = bench_of(link_setup, workers=2)
    bench.send()
    bench.receive(0)
    bench.remove(0)
    bench.receiver_notices(0)
    bench.sync(1)
    bench.wait()
    bench.join(0)
    bench.sync(0)
    bench.finish()


def a_cut_with_an_update_outstanding(link_setup: LinkSetup) -> None:
    """The connection breaks while both ends live: the sender counts the link as lost, the worker connects again."""
    bench = bench_of(link_setup, workers=2)
    bench.send()
    bench.receive(0)
    bench.cut(0)
    bench.sync(1)
    bench.sender_notices(0)
    bench.receiver_notices(0)
    bench.wait()
    bench.join(0)
    bench.sync(0)
    bench.finish()


PROTOCOL_SCENARIOS = (
    Scenario("handshake", handshake, over_losses=True),
    Scenario("updates", updates),
    Scenario("the first update with the handshake", the_first_update_with_the_handshake),
    Scenario("refusal", refusal),
    Scenario("duplicate", duplicate),
    Scenario("stale", stale),
    Scenario("newer overtakes", newer_overtakes),
    Scenario("deadline", deadline),
    Scenario("takeover", takeover),
    Scenario("fenced", fenced),
    Scenario("the sender says bye", the_sender_says_bye),
    Scenario("a worker says bye", a_worker_says_bye),
    Scenario("an idle worker says bye", an_idle_worker_says_bye),
    Scenario("a worker is lost", a_worker_is_lost),
    Scenario("a worker comes back", a_worker_comes_back),
    Scenario("the sender is lost", the_sender_is_lost),
    Scenario("removal", removal),
    Scenario("a cut with an update outstanding", a_cut_with_an_update_outstanding, needs=Ability.CUT),
)
