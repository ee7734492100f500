"""Run one situation of a TorchRL collector with workers over RPC or torch.distributed, on our schemes.

    python remote_collectors.py rpc|distributed SITUATION PORT

It prints one line of JSON for each step. The last one, "over", follows when the collector is shut down and all child
processes have ended. It lists the threads of weightsync that are left.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from collecting import cartpole, choose, chosen, policy, random_policy, tensordict
from torch.distributed import rpc
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.collectors.distributed import DistributedCollector, RPCCollector

from weightsync import DistributedWeightSyncScheme, RPCWeightSyncScheme, WeightSyncScheme, WeightUpdaterBase

KINDS: dict[str, tuple[Any, type[WeightSyncScheme]]] = {
    "rpc": (RPCCollector, RPCWeightSyncScheme),
    "distributed": (DistributedCollector, DistributedWeightSyncScheme),
}
FRAMES, WORKERS = 20, 2


def say(step: str, what: Any) -> None:
    print(json.dumps([step, what]), flush=True)


class Run:
    """A collector and its batches.

    Args:
        kind: "rpc" or "distributed".
        port: a free port, followed by more free ones.
        strategy: the strategy of the scheme. None: its default.
        updater: a weight updater, which pushes the weights instead of the scheme.
        workers: the number of workers.
        options: further arguments of the collector.
    """

    def __init__(
        self,
        kind: str,
        port: int,
        strategy: str | None = None,
        updater: Any = None,
        workers: int = WORKERS,
        **options: Any,
    ) -> None:
        collector_class, scheme_class = KINDS[kind]
        self.scheme = scheme_class(**({} if strategy is None else {"strategy": strategy}))
        given: dict[str, Any] = {"collector_class": Collector, "sync": True, "policy": None, **options}
        given |= {"weight_sync_schemes": {"policy": self.scheme}} if updater is None else {"weight_updater": updater}
        self.collector = collector_class(
            [cartpole] * workers, frames_per_batch=FRAMES, total_frames=10**6, launcher="mp", tcp_port=port, **given
        )
        self.batches: Iterator[Any] = iter(self.collector)

    def acted(self) -> list[int]:
        """The actions of the next batch."""
        return sorted(chosen(next(self.batches)))

    def actions(self) -> list[list[int]]:
        """The actions of each worker in the next batch, sorted, since RPC's workers answer in any order."""
        return sorted(sorted(chosen(part)) for part in next(self.batches).reshape(-1).split(FRAMES // WORKERS))

    def served(self) -> list[int]:
        return [entry.served for entry in self.scheme.get_sender().workers.values()]


def a_policy(make: Callable[..., Run]) -> Run:
    """Send weights in every form, the trainer's own weights, and weights for one worker."""
    made = policy(0)
    run = make(policy=made)
    say("first", run.acted())
    for name, weights in (
        ("module", policy(1)),
        ("tensordict", tensordict(policy(0))),
        ("dict", dict(policy(1).state_dict())),
    ):
        run.collector.update_policy_weights_(weights)
        say(name, run.acted())
    choose(made, 0)
    run.collector.update_policy_weights_()
    say("own", run.acted())
    run.collector.update_policy_weights_(policy(1), worker_ids=[1])
    say("one worker", run.actions())
    report = run.scheme.send(policy(1))
    say("report", [report.ok, sorted({outcome.evidence.name for outcome in report.outcomes.values()})])
    say("in the end", run.acted())
    return run


def factories(make: Callable[..., Run]) -> Run:
    """Run without a policy in the trainer, and send weights for single workers."""
    run = make(policy_factory=[functools.partial(policy, 0), functools.partial(policy, 0)], strategy="tensordict")
    say("first", run.acted())
    run.collector.update_policy_weights_(policy(1))
    say("module", run.acted())
    run.collector.update_policy_weights_({0: tensordict(policy(0)), 1: tensordict(policy(1))})
    say("each its own", run.actions())
    run.collector.update_policy_weights_({1: tensordict(policy(0))})
    say("one left out", run.acted())
    return run


def without_weights(make: Callable[..., Run]) -> Run:
    """Run a `RandomPolicy`, which has no weights: versions and acks work as usual."""
    run = make(policy=random_policy())
    say("frames", next(run.batches).numel())
    before = run.served()
    run.collector.update_policy_weights_()
    say("versions", [after - earlier for earlier, after in zip(before, run.served(), strict=True)])
    say("frames", next(run.batches).numel())
    return run


def workers_of_workers(make: Callable[..., Run]) -> Run:
    """Run a worker that has workers of its own, which receive the weights too."""
    run = make(
        workers=1,
        policy_factory=functools.partial(policy, 0),
        collector_class=MultiSyncCollector,
        num_workers_per_collector=2,
    )
    say("first", run.acted())
    run.collector.update_policy_weights_(policy(1))
    say("module", run.acted())
    return run


class OverRpc(WeightUpdaterBase):
    """An updater that calls TorchRL's collectors in their processes by RPC."""

    def all_worker_ids(self) -> list[int]:
        return list(range(WORKERS))

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> Any:
        return self.collector.collector_rrefs[worker_id].rpc_sync().update_policy_weights_(server_weights)


class OverStore(OverRpc):
    """An updater that sends the instructions of TorchRL's worker loops over torch.distributed."""

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> Any:
        store, rank = self.collector._store, worker_id + 1
        store.set(f"NODE_{rank}_in", b"update_weights")
        server_weights.send(rank)
        said = store.get(f"NODE_{rank}_out")
        store.delete_key(f"NODE_{rank}_out")
        if said != b"updated":
            raise RuntimeError(f"the worker said {said!r}")


def an_updater(make: Callable[..., Run]) -> Run:
    updater = OverRpc() if make.args[0] == "rpc" else OverStore()  # type: ignore[attr-defined]
    run = make(policy=policy(0), updater=updater)
    say("registered", updater.collector is run.collector)
    say("first", run.acted())
    run.collector.update_policy_weights_(policy(1))
    say("module", run.acted())
    return run


SITUATIONS = {each.__name__: each for each in (a_policy, factories, without_weights, workers_of_workers, an_updater)}


def main(kind: str, situation: str, port: str) -> None:
    run = SITUATIONS[situation](functools.partial(Run, kind, int(port)))
    run.collector.shutdown()
    run.scheme.shutdown()
    for process in multiprocessing.active_children():
        process.join()
    assert not rpc.api._is_current_rpc_agent_set(), "RPC still runs"
    ours = [thread.name for thread in threading.enumerate() if thread.name.startswith("weightsync")]
    say("over", ours)


if __name__ == "__main__":
    main(*sys.argv[1:])
