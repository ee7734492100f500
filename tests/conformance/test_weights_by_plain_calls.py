"""Weights of every kind are given to methods of actors and collectors without our receiver, bit by bit (issue 4, 7)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fleet import PATIENCE, Crew, Seat
from torch.distributed import rpc
from weight_kinds import BY_NAME, Kind, expected, snapshot
from world_adapters import enter_rpc

from weightsync import Evidence, RayWeightSyncScheme, RPCWeightSyncScheme

pytestmark = [
    # Ray's C++ and its background threads leave what they do not close to the collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    # torch warns of complex32 whenever it allocates some, as the table of kinds does.
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]


class Keeper:
    """Keeps what its method was given; nothing of ours is in it."""

    def __init__(self) -> None:
        self.given: Any = None

    def update_policy_weights_(self, policy_or_weights: Any) -> None:
        self.given = policy_or_weights

    def shows(self) -> dict[str, Any]:
        return snapshot(self.given)


def is_given_whole(kind: Kind, scheme: Any, shows: Callable[[], Any], **reach: Any) -> bool:
    """Whether what the method was given is what was sent, twice; closes the scheme."""
    source, right = kind.source(1), []
    with scheme:
        scheme.init_on_sender("policy", **reach)
        for _ in range(2):
            wanted = expected(source)
            report = scheme.get_sender().send(source, timeout=PATIENCE)
            right.append(report[0].evidence is Evidence.CALL and shows() == wanted)
            source = kind.change(source)
    return right == [True, True]


@pytest.mark.ray
def test_a_plain_actor_is_given_every_kind(cluster: Any) -> None:
    import ray  # noqa: PLC0415 - an extra

    actor = ray.remote(num_cpus=0)(Keeper).remote()

    def shows() -> Any:
        return ray.get(actor.shows.remote(), timeout=PATIENCE)

    wrong = [
        kind.name
        for kind in BY_NAME.values()
        if not is_given_whole(kind, RayWeightSyncScheme(), shows, remote_collectors=[actor])
    ]
    ray.kill(actor)
    assert wrong == []


@pytest.mark.rpc
def test_a_plain_collector_is_given_every_kind(crew: Crew, tmp_path: Path) -> None:
    assert rpc.is_available(), "this torch was built without RPC, which these tests need"
    trainer, worker = crew.start(None, 2)
    trainer.tell(join, str(tmp_path), 0)
    worker.do(join, str(tmp_path), 1)
    trainer.answer()

    assert trainer.do(wrong_by_rpc) == []
    for process in (trainer, worker):
        process.kill()


def join(seat: Seat, folder: str, rank: int) -> None:
    enter_rpc(folder, f"rank-{rank}", rank, 2)


def wrong_by_rpc(seat: Seat) -> list[str]:
    """The kinds of which a collector at the other rank is not given all."""
    rref = rpc.remote("rank-1", Keeper)

    def shows() -> Any:
        return rref.rpc_sync(timeout=PATIENCE).shows()

    return [
        kind.name
        for kind in BY_NAME.values()
        if not is_given_whole(kind, RPCWeightSyncScheme(), shows, collector_rrefs=[rref])
    ]
