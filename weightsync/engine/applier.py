"""Applies a pending version: verifies it, stages it next to the live weights, swaps it in whole, and answers."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from functools import partial
from weakref import ref

import torch
from msgspec.structs import replace

from weightsync.clock import Stopwatch
from weightsync.engine.listening import Listening
from weightsync.engine.receiver_driver import Pending, ReceiverDriver
from weightsync.engine.serving_lock import ServedModel, StagedVersion
from weightsync.errors import ConfigurationError, LayoutError, ModelPathError, WeightSyncError, reason_of
from weightsync.protocol import receiver as pure
from weightsync.protocol._tables import RefusalKind, State
from weightsync.protocol.codec import slot_digest
from weightsync.protocol.messages import Ack, Refusal, Update
from weightsync.protocol.report import Evidence
from weightsync.transports.buffers import NoRoom
from weightsync.transports.device import Slot
from weightsync.transports.mapping import Mapping
from weightsync.weights.destination_checks import FunctionalCallError
from weightsync.weights.device.base import DeviceMemory
from weightsync.weights.target import Mode, Staged, SwapBroken, Target
from weightsync.weights.tensors import fake_mode, refusing_fake_mode
from weightsync.weights.tree_digest import digest

try:
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
except ImportError:  # a torch without it: every swap is kept from its compiler
    get_eval_frame_callback = object  # type: ignore[assignment]

logger = logging.getLogger("weightsync")


@torch.compiler.disable(reason="a swap is not compiled")  # type: ignore[no-untyped-call,untyped-decorator]
def _swap_uncompiled(target: Target, staged: Staged) -> None:
    """Swap without torch's compiler, which would make it fail half way: a compiled function may begin a block."""
    target.swap(staged)


class Applier:
    """Applies the pending version whole, or refuses it.

    Args:
        driver: the receiver's driver.
        served: the model that weights are applied to.
        listening: the receiver's links.
    """

    def __init__(self, driver: ReceiverDriver, served: ServedModel, listening: Listening) -> None:
        self._driver = driver
        self._served = served
        self._listening = listening
        #: The slot of the version served, and that of the version before, if it is not tidied up yet.
        self._slot: Callable[[], Slot | None] | None = None
        self._previous_slot: Callable[[], Slot | None] | None = None
        #: Whether a staged version waits until the model has its parameters back.
        self.awaits_parameters = self._warned = False
        #: Why the last refused version could not be applied; empty if none was refused.
        self.last_refusal = ""
        #: The error of the swap that left the model without a whole version, or None.
        self.swap_error: WeightSyncError | None = None

    def receive_and_apply(self) -> bool | None:
        """Read the links, and apply the pending version to the registered model unless another thread serves that.

        If the model's path no longer leads to a model, the update is refused.

        Returns:
            True: a version went live. False: it was refused. None: neither.

        Raises:
            ConfigurationError, ModelPathError: no model is registered, or none was ever found at its path.
        """
        try:
            target = self._served.destination()
        except (ConfigurationError, LayoutError, ModelPathError) as error:
            if self._served.model is None or isinstance(self._served.model, str):
                raise
            return self._refuse_without_model(error)
        return self._receive_and_apply_to(target)

    def _receive_and_apply_to(self, target: Target) -> bool | None:
        """Read the links, stage what is pending, and swap it in: see `receive_and_apply`.

        The serving lock is taken before the driver's, and held until `version` names the version that is live.
        """
        with self._driver.lock:
            self._driver.pump()
            if self._served.staged is not None and self._served.staged.pending is not self._driver.pending:
                self._served.staged = None
            known = self._served.target or target  # another model may have been registered since
            if self._served.staged is None and self._can_apply() and not self._stage(known):
                return False
        applied = self.swap_staged(0.0) if self._served.staged is not None else None
        with self._driver.lock:
            if applied is None:
                if self._previous_slot is not None:
                    self._tidy(self._previous_slot())
                self._listening.check()
            return applied

    def _tidy(self, slot: Slot | None) -> None:
        """Nothing is pending: use the time to prepare the slot that the model no longer views for its next use."""
        self._previous_slot = None
        if slot is not None and self._served.target is not None:
            slot.tidy(self._served.target.only_keeps)

    def _refuse_without_model(self, error: WeightSyncError) -> bool | None:
        """Refuse the pending version: there is no model to apply it to."""
        with self._driver.lock:
            self._driver.pump()
            pending = self._driver.pending
            if pending is None or not self._can_apply():
                self._listening.check()
                return None
            path = self._served.path
            found = "" if path is None else f"weights cannot be applied to what is at {path!r}: "
            self.refuse(pending, f"{found}{error}", "".join(traceback.format_exception(error)))
            return False

    def _can_apply(self) -> bool:
        driver = self._driver
        return driver.machine.state is State.PENDING_ASYNC and not isinstance(driver.data.answer, pure.Deferred)

    def swap_staged(self, timeout: float) -> bool | None:
        """Swap in what is staged, once no other thread serves the model.

        Args:
            timeout: seconds to wait for that.

        Returns:
            True: it went live. False: it was refused. None: another thread still serves, or nothing is staged.
        """
        try:
            self._served.follow_path()
        except (ConfigurationError, LayoutError, ModelPathError) as error:
            return self._refuse_without_model(error)
        serving = self._served.serving
        if not serving.begin_swap(timeout):
            return None
        try:
            with self._driver.lock:
                if not self._can_apply() or self._served.target is None:
                    return None
                return self._apply_outside_functional_call(self._served.target)
        finally:
            serving.end_swap()

    def _apply_outside_functional_call(self, target: Target) -> bool | None:
        """Apply, unless other tensors stand in for the model's parameters: then the reader tries again later."""
        target.refuses_functional_calls = self._listening.background_reader is not None
        try:
            return self.apply(target)
        except FunctionalCallError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "model %r: %s The version waits. Call the model inside `with receiver.serving():`, so that the "
                    "version goes live before the call.",
                    self._driver.model_id,
                    error,
                )
            self.awaits_parameters = True
            return None
        finally:
            target.refuses_functional_calls = False

    def _stage(self, target: Target) -> bool:
        """Verify and stage the pending version next to the live weights; False: it was refused."""
        pending = self._driver.pending
        assert pending is not None
        stopwatch = Stopwatch()
        try:
            if fake_mode() is not None:
                raise refusing_fake_mode()
            ack_digest = self.verified(pending)
            in_slot = pending.slot is not None
            staged = target.stage(pending.layout, self._payload_to_stage(pending), pending.update.extras, in_slot)
            if isinstance(pending.slot, Mapping) and pending.slot.pinnable and (device := target.device) is not None:
                register = partial(device.register, read_only=True)
                staged = replace(staged, pinned=pending.slot.pinned(pending.layout.nbytes, register))
        except Exception as error:  # noqa: BLE001 - the refusal carries whatever a user's hook raised
            self.refuse_for(pending, error)
            return False
        self._served.staged = StagedVersion(pending, staged, ack_digest, stopwatch.seconds)
        return True

    def _payload_to_stage(self, pending: Pending) -> memoryview | DeviceMemory:
        """The payload; read-only if the next version may be a delta against it, so that nobody gets views to write."""
        payload, base = pending.payload, pending.update.base
        if base is None or not isinstance(payload, memoryview) or self._served.apply_mode is Mode.COPY:
            return payload
        return payload.toreadonly()

    def apply(self, target: Target) -> bool:
        """Stage the pending version if need be, and swap it in. The caller holds the serving lock and the driver's.

        Returns:
            Whether it went live; False: it was refused.

        Raises:
            WeightSyncError: the swap failed half way and could not be undone; the receiver is closed.
            FunctionalCallError: other tensors are in the places of the parameters, and a background reader is to wait;
                nothing has changed.
        """
        staged_version = self._served.staged
        if staged_version is None or staged_version.pending is not self._driver.pending:
            if not self._stage(target):
                return False
            staged_version = self._served.staged
        assert staged_version is not None
        stopwatch = Stopwatch()
        try:
            if fake_mode() is not None:
                raise refusing_fake_mode()
            # Asked before the swap: no user code may run between the swap and APPLIED.
            reader = self._listening.background_reader
            relays = reader is not None and reader.prepare_relay()
            if self._served.shared is not None:
                self._served.unshare()
            if get_eval_frame_callback() is None:
                target.swap(staged_version.staged)
            else:
                _swap_uncompiled(target, staged_version.staged)
        except SwapBroken as error:
            raise self._close_on_broken_swap(staged_version, error, traceback.format_exc()) from error
        except FunctionalCallError:
            raise
        except Exception as error:  # noqa: BLE001 - the refusal carries whatever a user's hook raised
            self.refuse_for(staged_version.pending, error)
            return False
        self._served.staged = None
        self._previous_slot, self._slot = self._slot, self._slot_reference(staged_version.pending.slot)
        self._served.applied, self._served.layout = staged_version.pending.update.digest, staged_version.pending.layout
        ack = self._ack(staged_version.pending, staged_version.digest, staged_version.seconds + stopwatch.seconds)
        self._driver.take(pure.Defer(ack) if relays else pure.Applied(ack))
        self._decided()
        return True

    def _slot_reference(self, slot: Slot | None) -> Callable[[], Slot | None] | None:
        """A reference to a slot in which parameters lie now, so that this process may write there."""
        return None if slot is None or self._served.apply_mode is Mode.COPY else ref(slot)

    def _close_on_broken_swap(
        self, staged_version: StagedVersion, error: SwapBroken, remote_traceback: str
    ) -> WeightSyncError:
        """Close the receiver, as a swap has failed half way; returns the error to raise."""
        self.swap_error = swap_error = self._swap_error_for(staged_version.pending, error)
        self._served.staged = None
        self._listening.stop()
        self._driver.break_down(str(swap_error), remote_traceback)
        self._decided()
        return swap_error

    def _decided(self) -> None:
        self.awaits_parameters = False
        if self._listening.background_reader is not None:
            self._listening.background_reader.version_decided()

    def _swap_error_for(self, pending: Pending, error: SwapBroken) -> WeightSyncError:
        return WeightSyncError(
            f"the swap of version {pending.update.version} of {self._driver.model_id!r} failed halfway and could not "
            f"be undone: the model serves nothing, and the receiver is closed. Start the worker again: a WorkerGroup "
            "does this up to max_restarts= times; without a group, call add_worker() in the trainer. Cause: "
            f"{error}"
        )

    def _ack(self, pending: Pending, digest: bytes, seconds: float) -> Ack:
        return Ack(
            model_id=self._driver.model_id,
            incarnation=pending.update.incarnation,
            version=pending.update.version,
            digest=digest,
            seconds=seconds,
        )

    def verified(self, pending: Pending) -> bytes:
        """What an ack names of a version that arrived as it was sent: its digest, or the slot that it lies in.

        Empty: the weights travelled without a digest.

        Raises:
            LayoutError: the digests differ: the payload was damaged on the way. Or its slot is not the one that its
                sender filled, or holds other weights by now.
            NoRoom: this process had no descriptor or memory for it.
        """
        if pending.untaken:
            raise NoRoom(
                f"version {pending.update.version} could not be received: {pending.untaken} The old weights stay. "
                "Free descriptors or memory in this process, then send the weights again."
            )
        slot = pending.slot
        # Parameters are views of it: this process may have written there when it held older weights, and hashed that.
        remapped = slot is not None and self._served.apply_mode is not Mode.COPY and slot.remap()
        slot_digest = b"" if slot is None else self._check_seal(pending.update, slot)
        if not pending.update.digest:
            return slot_digest
        hashes, extras = None if remapped else pending.hashes, pending.update.extras
        computed = digest(pending.on_host(), extras) if hashes is None else hashes.combined(extras)
        if computed != pending.update.digest:
            raise LayoutError(
                f"version {pending.update.version} arrived with digest {computed.hex()}, but its sender sent "
                f"{pending.update.digest.hex()}: it was damaged on the way, or its tensors were changed while they "
                "were packed. The old weights stay."
            )
        return computed

    def digest_sent(self, pending: Pending) -> bytes:
        """The digest of a pending version as its sender sent it; it is computed here if the sender computed none."""
        update, slot = pending.update, pending.slot
        if update.digest:
            return update.digest
        if slot is not None and self._served.apply_mode is not Mode.COPY:
            slot.remap()  # this process may have written there when it held older weights
        return digest(pending.on_host(), update.extras)

    def _check_seal(self, update: Update, slot: Slot) -> bytes:
        """Check that a slot is the one that the update's sender filled for it; returns what an ack names of it."""
        seal = slot.seal
        if update.slot is None or seal != update.slot.seal or not any(seal):
            number = "" if update.slot is None else f" {update.slot.segment}"
            raise LayoutError(
                f"version {update.version} should be in shared memory{number}, but the memory that this worker has "
                "mapped there does not have its seal: it is other memory, or the trainer is writing there again. The "
                "old weights stay. Send the weights again: the trainer then passes the memory again."
            )
        return slot_digest(seal, update.incarnation, update.version, update.layout_digest, update.extras)

    def refuse_for(self, pending: Pending, error: Exception) -> None:
        """Refuse a version because of an exception that is being handled.

        Args:
            pending: the version.
            error: the exception. Its traceback is sent too, unless its text says it all.
        """
        self.refuse(pending, reason_of(error), "" if isinstance(error, NoRoom) else traceback.format_exc())

    def refuse(self, pending: Pending, reason: str, remote_traceback: str) -> None:
        """Refuse a version, and discard what was staged.

        Args:
            pending: the version.
            reason: why, for `last_refusal`, the log and the sender.
            remote_traceback: the traceback for the sender, or empty.
        """
        self.last_refusal = reason
        self._served.staged = None
        self._driver.take(pure.Refused(self.refusal(pending, reason, remote_traceback)))
        self._decided()
        # Last: where the user's log handler raises, the sender has its answer.
        logger.warning("model %r refused version %d: %s", self._driver.model_id, pending.update.version, reason)

    def refusal(
        self, pending: Pending, reason: str, remote_traceback: str, evidence: Evidence = Evidence.ANSWER
    ) -> Refusal:
        """The refusal of a version as a message.

        Args:
            pending: the version.
            reason: why it is refused.
            remote_traceback: the traceback for the sender, or empty.
            evidence: what the refusal rests on.
        """
        return Refusal(
            model_id=self._driver.model_id,
            incarnation=pending.update.incarnation,
            version=pending.update.version,
            kind=RefusalKind.REFUSED,
            reason=reason,
            remote_traceback=remote_traceback,
            fence=self._driver.data.fence,
            evidence=evidence,
        )
