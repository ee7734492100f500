"""How what has arrived becomes live: verified, staged beside what is served, swapped in whole, and answered for."""

from __future__ import annotations

import logging
import traceback
from dataclasses import dataclass

from weightsync.clock import Stopwatch
from weightsync.engine.listening import Listening
from weightsync.engine.receiver_driver import Pending
from weightsync.errors import ConfigurationError, LayoutError, ModelPathError, WeightSyncError
from weightsync.protocol import receiver as pure
from weightsync.protocol._tables import RefusalKind, State
from weightsync.protocol.messages import Ack, Refusal
from weightsync.protocol.report import Evidence
from weightsync.transports.buffers import NoRoom
from weightsync.weights.packing import digest
from weightsync.weights.target import Mode, Staged, SwapBroken, Target

logger = logging.getLogger("weightsync")


@dataclass(frozen=True, slots=True)
class Ready:
    """A version that has been verified and staged, and only has to be swapped in."""

    pending: Pending
    staged: Staged
    digest: bytes
    seconds: float


class Applier(Listening):
    """A receiver that makes live what is pending, or refuses it."""

    def _begin(self) -> None:
        super()._begin()
        self._staged: Ready | None = None
        #: Why the last version that was refused did not fit; empty: none was refused.
        self.last_refusal = ""
        #: Why the model serves nothing any more; None: it does.
        self.broken: WeightSyncError | None = None

    def _drop_target(self) -> None:
        super()._drop_target()
        self._staged = None

    def receive_and_apply(self, target: Target) -> bool | None:
        """Read, stage, and make live what is pending unless somebody holds the version served.

        The serving lock comes before the driver's and is held until `version` names what is live.

        Returns:
            Whether a version went live; False: it was refused; None: nothing was decided.
        """
        with self._driver.lock:
            self._driver.pump()
            if self._staged is not None and self._staged.pending is not self._driver.pending:
                self._staged = None
            if self._appliable() and not self._stage(target):
                return False
        applied = self._swap_staged(0.0) if self._staged is not None else None
        with self._driver.lock:
            if applied is None:
                self.check_links()
            return applied

    def receive_and_apply_here(self) -> bool | None:
        """Receive and apply to the registered model. An update is refused if its path leads to no model any more.

        Raises:
            ConfigurationError, ModelPathError: no model is registered, or there was never one at its path.
        """
        try:
            target = self._destination()
        except (ConfigurationError, LayoutError, ModelPathError) as error:
            if self._model is None or isinstance(self._model, str):
                raise
            return self._turn_down(error)
        return self.receive_and_apply(target)

    def _turn_down(self, error: WeightSyncError) -> bool | None:
        """Refuse what is pending, since there is nothing that it could be applied to."""
        with self._driver.lock:
            self._driver.pump()
            pending = self._driver.pending
            if pending is None or not self._appliable():
                self.check_links()
                return None
            found = "" if self._path is None else f"what stands at {self._path!r} cannot be received into: "
            self._refuse(pending, f"{found}{error}", "".join(traceback.format_exception(error)))
            return False

    def _appliable(self) -> bool:
        return self.state is State.PENDING_ASYNC and not self._driver.deferring

    def _swap_staged(self, timeout: float) -> bool | None:
        """Make live what is staged, once nobody serves; None: somebody does, or there is nothing."""
        self._look_again()
        with self._serving.swapping(timeout) as free, self._driver.lock:
            if not free or not self._appliable() or self._target is None:
                return None
            return self._apply(self._target)

    def _stage(self, target: Target) -> bool:
        """Verify and validate what is pending, beside what is live; False: it was refused."""
        pending, stopwatch = self._driver.pending, Stopwatch()
        assert pending is not None
        if self._staged is not None and self._staged.pending is pending:
            return True
        try:
            digest = self._verified(pending)
            staged = target.stage(pending.layout, pending.payload, pending.update.extras)
        except Exception as error:  # noqa: BLE001 - whatever a user's hook raises is told to the sender
            self._refuse_for(pending, error)
            return False
        self._staged = Ready(pending, staged, digest, stopwatch.seconds)
        return True

    def _apply(self, target: Target) -> bool:
        """Make live what is pending. The serving lock and the driver's are held."""
        if not self._stage(target):
            return False
        ready, stopwatch = self._staged, Stopwatch()
        assert ready is not None
        try:
            # Asked before the swap: nothing of a user's runs between it and APPLIED.
            hands_on = self._attendant is not None and self._attendant.hands_on()
            target.swap(ready.staged)
        except SwapBroken as error:
            raise self._break_down(ready, error, traceback.format_exc()) from error
        except Exception as error:  # noqa: BLE001 - whatever a user's hook raises is told to the sender
            self._refuse_for(ready.pending, error)
            return False
        self._staged = None
        ack = self._ack(ready.pending, ready.digest, ready.seconds + stopwatch.seconds)
        self._driver.take(pure.Defer(ack) if hands_on else pure.Applied(ack))
        self._decided()
        return True

    def _break_down(self, ready: Ready, error: SwapBroken, remote_traceback: str) -> WeightSyncError:
        self.broken = broken = self._broken(ready.pending, error)
        self._staged = None
        self._deafen()
        self._driver.break_down(str(broken), remote_traceback)
        self._decided()
        return broken

    def _decided(self) -> None:
        if self._attendant is not None:
            self._attendant.applied()

    def _broken(self, pending: Pending, error: SwapBroken) -> WeightSyncError:
        return WeightSyncError(
            f"version {pending.update.version} of {self._model_id!r} was swapped in half and could not be undone: "
            f"the model serves nothing, the receiver is closed. Cause: {error}"
        )

    def _ack(self, pending: Pending, digest: bytes, seconds: float) -> Ack:
        return Ack(
            model_id=self._model_id,
            incarnation=pending.update.incarnation,
            version=pending.update.version,
            digest=digest,
            seconds=seconds,
        )

    def _verified(self, pending: Pending) -> bytes:
        """The digest of what arrived, if the sender named one.

        Raises:
            LayoutError: it was damaged on the way.
            NoRoom: it could not be taken in here.
        """
        if pending.untaken:
            raise NoRoom(
                f"version {pending.update.version} could not be taken: {pending.untaken} The old weights stay. It is "
                "taken again once this process has descriptors and memory: send the weights once more then."
            )
        if not pending.update.digest:
            # No digest would show what this process has written over the pages that it mapped for an older version.
            if self._scheme.apply_mode is Mode.MAP:
                pending.refresh()
            return b""
        found = digest(pending.payload, pending.update.extras)
        if found != pending.update.digest:
            pending.refresh()
            found = digest(pending.payload, pending.update.extras)
        if found != pending.update.digest:
            raise LayoutError(
                f"version {pending.update.version} arrived with digest {found.hex()}, but its sender named "
                f"{pending.update.digest.hex()}: it was damaged on the way. The old weights stay."
            )
        return found

    def _refuse_for(self, pending: Pending, error: Exception) -> None:
        """Refuse, since ``error`` was raised just now; where no code of the user's raised it, the text says all."""
        self._refuse(pending, str(error), "" if isinstance(error, NoRoom) else traceback.format_exc())

    def _refuse(self, pending: Pending, reason: str, remote_traceback: str) -> None:
        self.last_refusal = reason
        self._staged = None
        logger.warning("model %r refused version %d: %s", self._model_id, pending.update.version, reason)
        self._driver.take(pure.Refused(self._refusal(pending, reason, remote_traceback)))
        self._decided()

    def _refusal(
        self, pending: Pending, reason: str, remote_traceback: str, evidence: Evidence = Evidence.ANSWER
    ) -> Refusal:
        return Refusal(
            model_id=self._model_id,
            incarnation=pending.update.incarnation,
            version=pending.update.version,
            kind=RefusalKind.REFUSED,
            reason=reason,
            remote_traceback=remote_traceback,
            fence=self._driver.data.fence,
            evidence=evidence,
        )
