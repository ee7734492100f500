"""Replays paths of the model's graph over an adapter: real drivers, one action at a time, compared after each."""

from __future__ import annotations

from typing import Any

from weightsync.errors import ProtocolError
from weightsync.testing.link_setup import LinkSetup
from weightsync.testing.projecting import RECEIVER_FIELDS, SENDER_FIELDS, difference
from weightsync.testing.refusing import refusals_of_receiver, refusals_of_sender
from weightsync.testing.replay_actors import ReplayActors
from weightsync.testing.replay_data import Configuration, Step
from weightsync.testing.rules import Rule, RuleViolation


class Replay:
    """One path, step by step.

    Args:
        link_setup: makes the links.
        configuration: the configuration that the path belongs to.
        tried: nodes at which the refusals were already tried.
    """

    def __init__(self, link_setup: LinkSetup, configuration: Configuration, tried: set[str]) -> None:
        self._watch = link_setup.watch
        self._actors = ReplayActors(link_setup, configuration)
        self._workers = configuration.workers
        self._tried = tried

    def take(self, step: Step) -> None:
        """Do the step, and compare every machine with the model.

        Raises:
            RuleViolation: a machine differs from the model, or the adapter broke a rule on the way.
            MessageLost: the adapter lost a message, as it may.
        """
        name, *arguments = step.label
        self._watch.steps.append(f"{name}({', '.join(map(str, arguments))})")
        try:
            self._actors.take(step)
        except ProtocolError as error:
            raise RuleViolation(Rule.STATE, f"a link was closed: {error}") from error
        self._watch.check()
        self._compare(step)
        self._refuse(step)
        self._actors.payloads.scribble()

    def finish(self) -> None:
        """Close everything that is left; every buffer must then be free."""
        self._actors.finish()

    def _compare(self, step: Step) -> None:
        for s, wanted in enumerate(step.senders, 1):
            if wanted is not None:
                found = self._actors.senders[s].projected(self._workers, self._actors.base)
                self._require_no_difference(f"sender {s}", difference(SENDER_FIELDS, wanted, found))
        for w, wanted in enumerate(step.receivers, 1):
            receiver = self._actors.receivers[w]
            self._require_no_difference(
                f"worker {w}", difference(RECEIVER_FIELDS, wanted, receiver.projected(self._actors.base))
            )
            if receiver.served is not None and not self._actors.payloads.intact(*receiver.served):
                raise RuleViolation(
                    Rule.PINNED, f"what worker {w} serves was overwritten before it acked a newer version"
                )

    def _require_no_difference(self, who: str, different: str) -> None:
        if different:
            raise RuleViolation(Rule.STATE, f"of {who}, {different}")

    def _refuse(self, step: Step) -> None:
        """Try what must be refused, at each node that was not visited before."""
        for s, wanted in enumerate(step.senders, 1):
            if wanted is not None and self._is_new(wanted):
                refusals_of_sender(self._actors.senders[s], self._actors.payloads, self._actors.base)
        for w, node in enumerate(step.receivers, 1):
            if self._is_new(node):
                refusals_of_receiver(self._actors.receivers[w], self._actors.base)

    def _is_new(self, node: Any) -> bool:
        before = len(self._tried)
        self._tried.add(repr(node))
        return len(self._tried) > before
