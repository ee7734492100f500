"""What a worker process does: act with the synchronised policy, and send what it experienced."""

from __future__ import annotations

import contextlib
import signal
import traceback
from multiprocessing.connection import Connection

import numpy as np
import torch

from weightsync import TransportError, WeightReceiver
from weightsync.demo.environments import Environments
from weightsync.demo.policy import Policy
from weightsync.demo.settings import CHUNK_STEPS, MODEL_ID, Settings
from weightsync.demo.wire import Chunk, Collect, Failure, FromWorker, Proof, Prove, Status, Stop

#: Seconds between two looks at the trainer's commands while there is nothing to collect.
_PAUSE = 0.002
#: The same, before the first version is there.
_FIRST_PAUSE = 0.2


def work(index: int, settings: Settings, link: Connection, channel: Connection) -> None:
    """Be worker `index` until told to stop, or until the trainer is gone.

    Args:
        index: the worker's id.
        settings: the run's settings.
        link: our end of the pipe that the scheme runs over.
        channel: our end of the pipe for experience and commands.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which then stops us
    torch.set_num_threads(1)
    with contextlib.suppress(OSError, EOFError, TransportError):  # each means: the trainer is gone
        try:
            _Worker(index, settings, link, channel).run()
        except (OSError, EOFError, TransportError):
            raise
        except Exception as error:  # noqa: BLE001 - the trainer is told, whatever it is
            channel.send(Failure(f"{type(error).__name__}: {error}", traceback.format_exc()))


class _Worker:
    def __init__(self, index: int, settings: Settings, link: Connection, channel: Connection) -> None:
        self._channel = channel
        self._policy = Policy()
        scheme = settings.scheme.build()
        scheme.init_on_worker(MODEL_ID, pipe=link, model=self._policy)
        self._receiver: WeightReceiver = scheme.get_receiver()
        first_seed = settings.seed * 1000 + index * 100
        self._environments = Environments(settings.environments, first_seed)
        self._generator = torch.Generator().manual_seed(first_seed)
        self._credit = 0
        self._going = True

    def run(self) -> None:
        """Wait for the first version, then collect for as long as there is credit."""
        try:
            while self._going and self._receiver.version is None:
                self._receiver.receive(timeout=_FIRST_PAUSE)
                self._obey()
            self._tell(self._status())
            while self._going:
                self._obey()
                if self._receiver.receive(timeout=0 if self._credit else _PAUSE):
                    self._tell(self._status())
                if self._credit and self._going:
                    self._credit -= 1
                    self._tell(self._collect())
        finally:
            self._environments.close()
            self._receiver.close()

    def _obey(self) -> None:
        while self._channel.poll():
            match self._channel.recv():
                case Collect(chunks):
                    self._credit += chunks
                case Prove():
                    self._credit = 0
                    self._tell(Proof(self._receiver.version, self._receiver.digest()))
                case Stop():
                    self._going = False

    def _tell(self, message: FromWorker) -> None:
        self._channel.send(message)

    def _status(self) -> Status:
        return Status(self._receiver.state.value, self._receiver.version)

    def _collect(self) -> Chunk:
        """Step all environments; a newer version is taken up between any two steps, as soon as it is there."""
        rows, versions, returns = [], [], []
        for _ in range(CHUNK_STEPS):
            self._receiver.receive(timeout=0)
            seen = self._environments.observations.copy()
            actions, logs = self._policy.act(seen, self._generator)
            following, fallen, ended, finished = self._environments.step(actions)
            rows.append((seen, following, actions, logs, fallen, ended))
            versions.append(self._receiver.version)
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
