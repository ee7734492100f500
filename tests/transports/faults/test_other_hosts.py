"""A pid is valid only on its own host: peers on other hosts are not watched by their pids."""

from __future__ import annotations

from fleet import MultiProcessWeightSyncScheme, Pair

import weightsync.engine.driver
import weightsync.engine.receiver_driver
import weightsync.engine.sender_driver
from weightsync.transports.pipe.link import PipeLink
from weightsync.transports.process import own_host


def test_g10_peers_on_this_host_are_watched_by_their_pids(monkeypatch):
    assert watched(monkeypatch) == 2


def test_g10_a_peer_on_another_host_is_not_watched_by_its_pid(monkeypatch):
    says = elsewhere()
    for module in (weightsync.engine.driver, weightsync.engine.sender_driver, weightsync.engine.receiver_driver):
        monkeypatch.setattr(module, "own_host", says)
    assert watched(monkeypatch) == 0


def elsewhere():
    """A fake `own_host` that returns another host at each call, so that no two peers share a host."""
    asked = iter(range(1000))
    return lambda: bytes([next(asked) % 256]) * 16


def watched(monkeypatch) -> int:
    """The number of ends of a pair that watch the other end's process."""
    seen = []
    monkeypatch.setattr(PipeLink, "watch", lambda link, pid, started: seen.append(pid))
    pair = Pair(MultiProcessWeightSyncScheme)
    assert pair.sync().ok
    pair.close()
    return len(seen)


def test_a_process_knows_its_own_host():
    assert own_host() == own_host()
    assert len(own_host()) == 16
