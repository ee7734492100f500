"""The trainer's side: start the workers, train, and let each prove in the end what it serves."""

from __future__ import annotations

import time

from weightsync import WeightSender
from weightsync.demo.board import Board, Phase
from weightsync.demo.fleet import Body, Fleet, start
from weightsync.demo.intake import Intake
from weightsync.demo.proof import Fate, Result, judge
from weightsync.demo.settings import (
    HALF_WAY,
    MODEL_ID,
    SOLVED,
    START_TIMEOUT,
    STAYS_SOLVED,
    UPDATES_AFTER_LOSS,
    WORKER_TIMEOUT,
    Casualty,
    Settings,
)
from weightsync.demo.syncing import Sync
from weightsync.demo.training import Training
from weightsync.demo.wire import Proof


def train(settings: Settings, board: Board, body: Body | None) -> Result:
    """Do the whole run. Whatever ends it, an interrupt too, no worker is left.

    Args:
        settings: what to do.
        board: where to write what there is to show.
        body: what worker processes run; None: `rollout.work`.
    """
    training = Training(settings.seed)
    scheme = settings.scheme.build()
    with start(settings, board.heard, body) as fleet:
        scheme.init_on_sender(MODEL_ID, model=training.policy, **fleet.arguments())
        with scheme.get_sender() as sender:
            board.watch(sender)
            return _Run(settings, board, fleet, training, sender).result()


class _Run:
    def __init__(
        self, settings: Settings, board: Board, fleet: Fleet, training: Training, sender: WeightSender
    ) -> None:
        self._settings = settings
        self._board = board
        self._fleet = fleet
        self._training = training
        self._sender = sender
        self._sync = Sync(sender, fleet, board, settings.sync)
        self._intake = Intake(fleet, board)
        self._killed: frozenset[int] = frozenset()
        self._updates_since = 0

    def result(self) -> Result:
        """Start, train, prove."""
        self._sync.send(self._training.policy, START_TIMEOUT)
        self._board.enter(Phase.TRAINING)
        self._train()
        self._board.enter(Phase.PROVING)
        fates = self._prove()
        self._board.enter(Phase.ENDED)
        view = self._board.view()
        return Result(
            settings=self._settings,
            seconds=view.elapsed,
            updates=view.updates,
            steps=view.steps,
            episodes=view.episodes,
            first_mean=self._board.first_mean,
            last_mean=view.mean_return,
            version=self._sender.version,
            digest=self._sender.digest(),
            fates=fates,
        )

    def _train(self) -> None:
        """Learn until the environment stays solved, or time is up, or nobody is left."""
        until = time.monotonic() + self._settings.seconds
        self._intake.begin()
        solved = 0
        while not self._sync.nobody_left:
            chunks, staleness = self._intake.gather(lambda: self._sender.version, until)
            if time.monotonic() >= until:
                break
            if chunks:
                self._training.learn(chunks)
                self._board.trained(sum(chunk.steps for chunk in chunks), staleness)
            self._sync.publish(self._training.policy)
            mean = self._board.mean_return or 0.0
            self._maybe_kill(mean)
            solved = solved + 1 if mean >= SOLVED else 0
            if solved >= STAYS_SOLVED and self._may_end():
                break
        self._sync.settle()

    def _maybe_kill(self, mean: float) -> None:
        half = mean >= HALF_WAY or self._board.elapsed >= self._settings.seconds / 2
        self._updates_since += 1
        if self._settings.casualty is Casualty.ONE and half and not self._killed:
            victim = self._settings.workers - 1
            self._killed = frozenset({victim})
            self._updates_since = 0
            self._board.note(f"worker {victim} (process {self._fleet.pids[victim]}) is killed with SIGKILL, half way")
            self._fleet.kill(victim)

    def _may_end(self) -> bool:
        if self._settings.casualty is Casualty.NONE:
            return True
        return bool(self._killed) and self._updates_since >= UPDATES_AFTER_LOSS

    def _prove(self) -> list[Fate]:
        """Send the last weights, and let everybody who is left prove to serve them."""
        everybody = range(self._settings.workers)
        self._sync.send(self._training.policy, WORKER_TIMEOUT)
        proofs = self._intake.proofs(frozenset(everybody) - self._sync.lost.keys())
        expected = Proof(self._sender.version, self._sender.digest())
        lost = dict.fromkeys(self._intake.gone, "its process has ended") | dict(self._sync.lost)
        return judge(everybody, self._killed & self._sync.lost.keys(), lost, proofs, expected)
