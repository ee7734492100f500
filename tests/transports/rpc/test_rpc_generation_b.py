"""Generation B over RPC: the scheme's `connect`, `send` and `receive`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fleet import PATIENCE, WorkerSetup, constants, filled, free_port, small
from rpc_fleet import World, retire
from skipping import require_modules
from torch.distributed import rpc

from weightsync import RPCWeightSyncScheme, WeightSyncScheme


class Remote:
    """A collector with a weightsync receiver, created and connected by RPC calls, like TorchRL's collectors."""

    def __init__(self, scheme: RPCWeightSyncScheme) -> None:
        self.policy = small()
        self.scheme = scheme

    def register(self) -> bool:
        """Initialise and connect the receiver, like TorchRL's `register_scheme_receiver`."""
        self.scheme.init_on_receiver(model_id="policy", context=self, worker_idx=0)
        self.scheme.connect(worker_idx=0)
        return self.scheme.synchronized_on_receiver

    def shown(self) -> set[float]:
        return constants(self.policy)

    def shutdown(self) -> None:
        self.scheme.shutdown()


class Trainer:
    """A context with the attributes of TorchRL's RPC collector that schemes read."""

    def __init__(self, names: list[str], rrefs: list[Any] | None = None) -> None:
        self.collector_infos = [rpc.get_worker_info(name) for name in names]
        self.num_workers = len(names)
        self.policy = small(1.0)
        if rrefs is not None:
            self.collector_rrefs = rrefs


@pytest.fixture
def crew(world: World) -> Any:
    yield world
    for process in (world.trainer, *world.workers):
        process.do(retire)


def meet(setup: WorkerSetup, names: list[str]) -> bool:
    """Initialise and connect the trainer's side."""
    setup.kept["context"] = context = Trainer(names)
    setup.scheme, setup.model = WeightSyncScheme.from_backend("rpc"), context.policy
    setup.scheme.init_on_sender(model_id="policy", context=context)
    setup.scheme.connect(timeout=PATIENCE)
    return bool(setup.scheme.synchronized_on_sender)


def meet_trainer(setup: WorkerSetup, worker_idx: int) -> set[float]:
    """Initialise and connect a worker's side. Returns the weights that it serves then."""
    setup.model, setup.scheme = small(), RPCWeightSyncScheme()
    setup.scheme.init_on_receiver(model_id="policy", model=setup.model, worker_idx=worker_idx)
    setup.scheme.connect(timeout=PATIENCE)
    return constants(setup.model)


def push(setup: WorkerSetup, fill: float, worker_ids: Any = None) -> Any:
    return setup.scheme.send(filled(setup.model, fill), worker_ids, timeout=PATIENCE)


def served(setup: WorkerSetup) -> set[float]:
    return constants(setup.model)


def test_connect_gives_the_workers_their_first_weights(crew: World) -> None:
    crew.workers[0].tell(meet_trainer, 0)
    crew.workers[1].tell(meet_trainer, 1)
    assert crew.trainer.do(meet, ["w0", "w1"])

    assert crew.workers[0].answer() == {1.0}
    assert crew.workers[1].answer() == {1.0}


def test_a_send_returns_once_the_background_readers_have_applied_it(crew: World) -> None:
    for index in (0, 1):
        crew.workers[index].tell(meet_trainer, index)
    crew.trainer.do(meet, ["w0", "w1"])
    for index in (0, 1):
        crew.workers[index].answer()

    assert crew.trainer.do(push, 2.0).ok
    assert [crew.workers[index].do(served) for index in (0, 1)] == [{2.0}, {2.0}]
    assert list(crew.trainer.do(push, 3.0, 1).outcomes) == [1]
    assert [crew.workers[index].do(served) for index in (0, 1)] == [{2.0}, {3.0}]


def test_a_worker_connected_by_an_rpc_call_does_not_block_the_trainer(crew: World) -> None:
    """TorchRL registers receivers in a call whose end the trainer awaits before it connects its own side."""
    started = time.monotonic()
    crew.trainer.do(meet_remote, "w0")

    assert time.monotonic() - started < PATIENCE / 2
    assert crew.trainer.do(remote_shown) == {1.0}
    assert crew.trainer.do(push, 4.0).ok
    assert crew.trainer.do(remote_shown) == {4.0}
    crew.trainer.do(end_remote)


def meet_remote(setup: WorkerSetup, name: str) -> None:
    rref = setup.kept["rref"] = rpc.remote(name, Remote, args=(RPCWeightSyncScheme(),))
    assert rref.rpc_sync(timeout=PATIENCE).register()
    setup.kept["context"] = context = Trainer([name], [rref])
    setup.scheme, setup.model = RPCWeightSyncScheme(), context.policy
    setup.scheme.init_on_sender(model_id="policy", num_workers=1, context=context)
    setup.scheme.connect(timeout=PATIENCE)


def remote_shown(setup: WorkerSetup) -> Any:
    return setup.kept["rref"].rpc_sync(timeout=PATIENCE).shown()


def end_remote(setup: WorkerSetup) -> None:
    setup.scheme.shutdown()
    setup.kept["rref"].rpc_sync(timeout=PATIENCE).shutdown()


@pytest.mark.torchrl
@pytest.mark.timeout(300)
def test_torchrls_own_rpc_collector_runs_on_our_scheme() -> None:
    require_modules("torchrl", "gymnasium", what="TORCHRL'S RPC COLLECTOR", extra="torchrl,rl")
    program = Path(__file__).with_name("torchrl_program.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, str(program), str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)

    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]  # printed by older torch
    assert said == ["0 [0.0]", "1 [1.0]", "2 [2.0]"]
