"""Methods of actors and collectors without a receiver get weights of every kind, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import PATIENCE, Crew, WorkerSetup
from tensordict import TensorDict
from torch.distributed import rpc
from weight_kinds import BY_NAME, Kind, expected, snapshot
from world_adapters import enter_rpc

from weightsync import Evidence, RayWeightSyncScheme, RayWeightUpdater, RPCWeightSyncScheme, SyncReport

pytestmark = [
    # Ray's C++ and its background threads leave sockets and files to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    # torch warns whenever complex32 is allocated, as in the table of kinds.
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]


class Keeper:
    """A plain peer that keeps the weights which its method was given."""

    def __init__(self) -> None:
        self.given: Any = None

    def starts(self) -> None:
        """Return once the actor has started."""

    def update_policy_weights_(self, policy_or_weights: Any) -> None:
        self.given = policy_or_weights

    def shows(self) -> dict[str, Any]:
        return snapshot(self.given)


def not_given_whole(make: Callable[[], Any], shows: Callable[[], Any], **reach: Any) -> list[str]:
    """The kinds of which the peer's method got other weights than a scheme sent, in two sends each."""
    wrong = []
    for kind in BY_NAME.values():
        with make() as scheme:
            scheme.init_on_sender("policy", **reach)
            wrong += not_pushed_whole(kind, scheme.get_sender().send, shows)
    return wrong


def not_pushed_whole(kind: Kind, send: Callable[..., SyncReport], shows: Callable[[], Any]) -> list[str]:
    source, wrong = kind.source(1), []
    for version in (1, 2):
        wanted = expected(source)
        report = send(source, timeout=PATIENCE, on_failure="report")
        if report[0].evidence is not Evidence.CALL or shows() != wanted:
            wrong.append(f"{kind.name}, version {version}: {report[0]} {report[0].reason}")
        source = kind.change(source)
    return wrong


@pytest.fixture
def keeper(cluster: Any) -> Iterator[Any]:
    import ray  # noqa: PLC0415 - an extra

    actor = ray.remote(num_cpus=0)(Keeper).remote()
    ray.get(actor.starts.remote())
    yield actor
    ray.kill(actor)


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_plain_actor_is_given_every_kind_of_weights(keeper: Any) -> None:
    import ray  # noqa: PLC0415 - an extra

    def shows() -> Any:
        return ray.get(keeper.shows.remote(), timeout=PATIENCE)

    assert not_given_whole(RayWeightSyncScheme, shows, remote_collectors=[keeper]) == []
    push = RayWeightUpdater(TensorDict(), [keeper]).push_weights
    assert [wrong for kind in BY_NAME.values() for wrong in not_pushed_whole(kind, push, shows)] == []


@pytest.mark.rpc
def test_a_plain_collector_is_given_every_kind_of_weights(crew: Crew, tmp_path: Path) -> None:
    assert rpc.is_available(), "this torch was built without RPC, which these tests need"
    trainer, worker = crew.start(None, 2)
    trainer.tell(join, str(tmp_path), 0)
    worker.do(join, str(tmp_path), 1)
    trainer.answer()

    assert trainer.do(wrong_by_rpc) == []
    for process in (trainer, worker):
        process.kill()


def join(setup: WorkerSetup, folder: str, rank: int) -> None:
    enter_rpc(folder, f"rank-{rank}", rank, 2)


def wrong_by_rpc(setup: WorkerSetup) -> list[str]:
    """The kinds that do not arrive whole at a collector on the other rank."""
    rref = rpc.remote("rank-1", Keeper)

    def shows() -> Any:
        return rref.rpc_sync(timeout=PATIENCE).shows()

    return not_given_whole(RPCWeightSyncScheme, shows, collector_rrefs=[rref])
