"""What a worker process does: act with the synchronised policy, and send what it experienced."""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import torch

from weightsync import TransportError, WeightReceiver
from weightsync.demo.environments import Environments
from weightsync.demo.grounds import Seat
from weightsync.demo.policy import Policy
from weightsync.demo.settings import CHUNK_STEPS, Settings
from weightsync.demo.wire import Chunk, Collect, Failure, FromWorker, Proof, Prove, Status, Stop

#: Seconds between two looks at the trainer's commands while there is nothing to collect.
_PAUSE = 0.002
#: The same, before the first version is there.
_FIRST_PAUSE = 0.2


def work(index: int, settings: Settings, seat: Seat, channel: Connection) -> None:
    """Be worker `index` until told to stop, or until the trainer is gone.

    Args:
        index: the worker's id.
        settings: the run's settings.
        seat: where the scheme reaches us.
        channel: our end of the pipe for experience and commands.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which then stops us
    torch.set_num_threads(1)
    with contextlib.suppress(OSError, EOFError, TransportError):  # each means: the trainer is gone
        try:
            _Worker(index, settings, seat, channel).run()
        except (OSError, EOFError, TransportError):
            raise
        except Exception as error:  # noqa: BLE001 - the trainer is told, whatever it is
            channel.send(Failure(f"{type(error).__name__}: {error}", traceback.format_exc()))
        finally:
            seat.leave()


class Rollout:
    """A policy that acts in environments of its own.

    Args:
        index: the worker's id.
        settings: the run's settings.
    """

    def __init__(self, index: int, settings: Settings) -> None:
        self.policy = Policy()
        first_seed = settings.seed * 1000 + index * 100
        self._environments = Environments(settings.environments, first_seed)
        self._generator = torch.Generator().manual_seed(first_seed)

    def collect(self, receiver: WeightReceiver, take_up: Callable[[], object]) -> Chunk:
        """Step all environments; between any two steps `take_up` may make a newer version live."""
        rows, versions, returns = [], [], []
        for _ in range(CHUNK_STEPS):
            take_up()
            seen = self._environments.observations.copy()
            with receiver.serving():
                actions, logs = self.policy.act(seen, self._generator)
                versions.append(receiver.version)
            following, fallen, ended, finished = self._environments.step(actions)
            rows.append((seen, following, actions, logs, fallen, ended))
            returns += finished
        seen_, following_, actions_, logs_, fallen_, ended_ = (np.stack(part) for part in zip(*rows, strict=True))
        return Chunk(
            observations=seen_,
            following=following_,
            actions=actions_,
            log_probabilities=logs_,
            fallen=fallen_,
            ended=ended_,
            versions=np.array(versions, dtype=np.int64),
            returns=tuple(returns),
        )

    def close(self) -> None:
        """Close the environments."""
        self._environments.close()


def status_of(receiver: WeightReceiver) -> Status:
    """How a worker stands."""
    return Status(receiver.state.value, receiver.version)


def proof_of(receiver: WeightReceiver) -> Proof:
    """What a worker serves."""
    return Proof(receiver.version, receiver.digest())


class _Worker:
    def __init__(self, index: int, settings: Settings, seat: Seat, channel: Connection) -> None:
        self._channel = channel
        self._rollout = Rollout(index, settings)
        self._tell(Status("joining", None))
        self._receiver = seat.take(settings.scheme.build(), self._rollout.policy)
        self._credit = 0
        self._going = True

    def run(self) -> None:
        """Wait for the first version, then collect for as long as there is credit."""
        try:
            while self._going and self._receiver.version is None:
                self._receiver.receive(timeout=_FIRST_PAUSE)
                self._obey()
            self._tell(status_of(self._receiver))
            while self._going:
                self._obey()
                if self._receiver.receive(timeout=0 if self._credit else _PAUSE):
                    self._tell(status_of(self._receiver))
                if self._credit and self._going:
                    self._credit -= 1
                    self._tell(self._rollout.collect(self._receiver, self._take_up))
        finally:
            self._rollout.close()
            self._receiver.close()

    def _take_up(self) -> None:
        self._receiver.receive(timeout=0)

    def _obey(self) -> None:
        while self._channel.poll():
            match self._channel.recv():
                case Collect(chunks):
                    self._credit += chunks
                case Prove():
                    self._credit = 0
                    self._tell(proof_of(self._receiver))
                case Stop():
                    self._going = False

    def _tell(self, message: FromWorker) -> None:
        self._channel.send(message)
