"""`send_sharded`: a model that is sharded over the ranks of a process group (FSDP2, DTensor) becomes one version.

Every rank calls it. They compare their parts and gather the tensors one by one, and the rank whose scheme has workers
sends. The other ranks get its report. All messages between the ranks are collectives of the process group.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor

from weightsync.clock import Deadline, Timeout
from weightsync.errors import ConfigurationError, LayoutError, SyncError, TransportError, WeightSyncError
from weightsync.options import OnFailure
from weightsync.protocol.report import SyncReport
from weightsync.protocol.report_codec import decode_report, encode_report
from weightsync.schemes.base import WeightSyncScheme
from weightsync.weights.layout import extra_state_name
from weightsync.weights.sharded import ShardedWeights

#: Seconds that the other ranks wait for the outcome after the deadline, at which the sending rank stops waiting.
GRACE: Final = 10.0

logger = logging.getLogger("weightsync")

_NO_FINGERPRINT: Final = bytes(16)


def send_sharded(
    scheme: WeightSyncScheme | None,
    model: Any,
    worker_ids: int | Sequence[int] | None = None,
    *,
    group: Any = None,
    timeout: float | Timeout | None = Timeout.DEFAULT,
    on_failure: OnFailure | str = OnFailure.RAISE,
) -> SyncReport:
    """Send a model that is sharded over ranks as the next version. Every rank of the group must call it.

    The ranks gather the model tensor by tensor with `DTensor.full_tensor`: each holds one whole tensor at a time, and
    the sending rank also a copy of all of them on the host. Tensors that are not sharded, and extra state, are those
    of the sending rank. A LoRA module is not merged.

    Args:
        scheme: on one rank (usually 0) a scheme that was initialised as the sender and connected; on the others None,
            or a scheme that was not initialised as a sender.
        model: this rank's part: a module wrapped by `torch.distributed.fsdp.fully_shard`, or a module, TensorDict or
            dict that holds DTensors. Do not register it with ``init_on_sender(model=...)``.
        worker_ids: as for `WeightSyncScheme.send`; only the sending rank's value counts.
        group: the process group of all these ranks; None: the default one. Its timeout, and those of the DTensors'
            meshes, are set to the rest of ``timeout`` if they are gloo's, and restored afterwards.
        timeout: seconds until the wait ends; give every rank the same; None: forever; default: `WEIGHTSYNC_TIMEOUT` or
            60. For the report of the sending rank the others wait up to 10 seconds longer. Other backends than gloo
            wait for their peers as long as their own timeout says.
        on_failure: as for `WeightSyncScheme.send`; give every rank the same.

    Returns:
        The outcome of each worker, on every rank. `SyncReport.sent_by_rank` names the rank that sent.

    Raises:
        ConfigurationError: there is no default process group, this rank is not in ``group``, or not exactly one rank
            has workers; nothing was sent.
        LayoutError: the ranks hold different models, or one holds what cannot be sent; nothing was sent.
        TransportError: a rank did not come, or failed, before the deadline. On the sending rank nothing was sent if
            this is raised before its send; the others cannot know whether it sent. A process group whose collective has
            failed cannot be used again.
        SyncError: on the other ranks, the sending rank's send failed before it had a report. The sending rank raises
            the error itself.
        AckTimeoutError, WorkerLostError, RefusedError, SyncError: on every rank, as `WeightSyncScheme.send`.
    """
    failure_policy = OnFailure(on_failure)
    ranks, sends = _Ranks(group, Deadline(timeout)), scheme is not None and scheme.initialized_on_sender
    weights, root = _agree_on_sender(ranks, model, sends)
    whole = _gather(ranks, weights, sends)
    if scheme is None or not sends:
        return _report_from_sender(ranks.result_of(root), root, failure_policy)
    try:
        side = scheme._sender_side
        side.rendezvous.require_connected("send_sharded", side.require_sender("send_sharded"))
        extras = {extra_state_name(module): state for module, state in weights.extras().items()}
        gathered = scheme.strategy.extract_weights(whole | extras)
        report = scheme.send(gathered, worker_ids, timeout=ranks.deadline.remaining, on_failure=OnFailure.REPORT)
        report = replace(report, sent_by_rank=root)
    except BaseException as error:
        ranks.announce(root, {"report": "", "error": f"{type(error).__name__}: {error}"})
        raise
    ranks.announce(root, {"report": encode_report(report).decode(), "error": _failure_of(report)})
    if failure_policy is OnFailure.RAISE:
        report.raise_on_failure()
    return report


def _agree_on_sender(ranks: _Ranks, model: Any, sends: bool) -> tuple[ShardedWeights, int]:
    """This rank's part of the model, after a check that all ranks hold parts of the same, and the rank that sends."""
    failure, fingerprint = None, _NO_FINGERPRINT
    try:
        weights = ShardedWeights(model)
        fingerprint = weights.fingerprint
    except WeightSyncError as error:
        failure = error
    messages = ranks.exchange(bytes([sends, failure is not None]) + fingerprint)
    if failure is not None:
        raise failure
    unreadable = [rank for rank, message in enumerate(messages) if message[1]]
    if unreadable:
        raise LayoutError(
            f"Ranks {unreadable} hold weights that cannot be sent: see the errors of these ranks. Nothing was sent."
        )
    others = [rank for rank, message in enumerate(messages) if message[2:] != fingerprint]
    if others:
        raise LayoutError(
            f"Ranks {others} hold a model with other names, shapes, dtypes, meshes or placements than rank "
            f"{ranks.rank}: give every rank its part of the same model. Nothing was sent."
        )
    senders = [rank for rank, message in enumerate(messages) if message[0]]
    if len(senders) != 1:
        raise ConfigurationError(
            f"Ranks {senders} gave a scheme that was initialised as the sender: exactly one rank must, usually rank 0. "
            "Nothing was sent."
        )
    return weights, senders[0]


def _gather(ranks: _Ranks, weights: ShardedWeights, sends: bool) -> dict[str, Any]:
    """The whole tensors by name, on the rank that sends; empty on the others."""
    whole: dict[str, Any] = {}
    with ranks.limited(*weights.groups) as limit, _explain_collective_errors("gather the weights", "Nothing was sent"):
        for name, tensor in weights.gather(limit):
            if sends:
                whole[name] = tensor.cpu()
    return whole


def _failure_of(report: SyncReport) -> str:
    try:
        report.raise_on_failure()
    except SyncError as error:
        return str(error)
    return ""


def _report_from_sender(result: dict[str, str], root: int, on_failure: OnFailure) -> SyncReport:
    """The report of the rank that sent, or its failure."""
    report = decode_report(result["report"].encode())
    if report is None:
        raise SyncError(f"Rank {root}, which sends, failed: {result['error']} That rank raised the error itself.")
    report = replace(report, sent_by_rank=root)
    if on_failure is OnFailure.RAISE:
        report.raise_on_failure()
        if result["error"]:  # of an update before this one, whose report stays with the rank that sent it
            raise SyncError(result["error"], report)
    return report


class _Ranks:
    """The ranks of a process group, for one send.

    Args:
        group: the process group; None: the default one.
        deadline: when waiting for the others ends.

    Raises:
        ConfigurationError: there is no such group, or this rank is not in it.
    """

    def __init__(self, group: Any, deadline: Deadline) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigurationError(
                "send_sharded() needs a process group: call torch.distributed.init_process_group() on every rank, or "
                "scheme.send() for a model that is not sharded. Nothing was sent."
            )
        self._group = dist.group.WORLD if group is None else group
        if self._group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ConfigurationError(
                "this rank is not in the process group that group= names: call send_sharded() on its ranks only. "
                "Nothing was sent."
            )
        self.rank = dist.get_rank(self._group)
        self.deadline = deadline
        on_host = "cpu:" in dist.get_backend_config(self._group)
        self._device = torch.device("cpu") if on_host else torch.accelerator.current_accelerator()

    def exchange(self, data: bytes) -> list[bytes]:
        """What each rank sent, in the order of the ranks; all send the same number of bytes."""
        own_tensor = self._tensor(data)
        tensors = [torch.empty_like(own_tensor) for _ in range(dist.get_world_size(self._group))]
        with (
            self.limited(self._group) as limit,
            _explain_collective_errors("compare what the ranks hold", "Nothing was sent"),
        ):
            limit()
            dist.all_gather(tensors, own_tensor, group=self._group)
        return [bytes(each.cpu().numpy()) for each in tensors]

    def announce(self, root: int, result: dict[str, str]) -> None:
        """On the rank that sends: send the others its result. A failure of that does not affect the workers."""
        try:
            data = json.dumps(result).encode()
            self._broadcast(self._tensor(len(data).to_bytes(8)), root)
            self._broadcast(self._tensor(data), root)
        except TransportError as error:
            logger.warning("%s The workers' outcomes are known on this rank only.", error)

    def result_of(self, root: int) -> dict[str, str]:
        """The result of the rank that sends."""
        header = self._broadcast(self._tensor(bytes(8)), root)
        size = int.from_bytes(bytes(header.cpu().numpy()))
        data = self._broadcast(torch.empty(size, dtype=torch.uint8, device=self._device), root)
        result: dict[str, str] = json.loads(bytes(data.cpu().numpy()))
        return result

    def _broadcast(self, tensor: Tensor, root: int) -> Tensor:
        unknown = "Whether the version was sent is known on that rank only"
        with (
            self.limited(self._group) as limit,
            _explain_collective_errors(f"learn the result of the send from rank {root}", unknown),
        ):
            limit(GRACE)
            dist.broadcast(tensor, group=self._group, group_src=root)
        return tensor

    def _tensor(self, data: bytes) -> Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)

    @contextlib.contextmanager
    def limited(self, *groups: Any) -> Iterator[_Limit]:
        """Limit the collectives of these groups to the time that is left; restore their own timeouts afterwards."""
        cpu = torch.device("cpu")
        gloo = [group._get_backend(cpu) for group in groups if "cpu:gloo" in dist.get_backend_config(group)]
        timeouts = [backend.options._timeout for backend in gloo]
        try:
            yield _Limit(gloo, self.deadline)
        finally:
            for backend, timeout in zip(gloo, timeouts, strict=True):
                backend._set_default_timeout(timeout)


class _Limit:
    """Sets the timeout of gloo's groups to the time that is left: called before each collective."""

    def __init__(self, backends: Sequence[Any], deadline: Deadline) -> None:
        self._backends = backends
        self._deadline = deadline

    def __call__(self, grace: float = 0.0) -> None:
        left = self._deadline.remaining
        if left is None:
            return
        for backend in self._backends:
            backend._set_default_timeout(timedelta(seconds=max(left + grace, 0.001)))


@contextlib.contextmanager
def _explain_collective_errors(action: str, consequence: str) -> Iterator[None]:
    """Raise TransportError for a collective that failed: torch raises a RuntimeError of its own."""
    try:
        yield
    except WeightSyncError:
        raise
    except RuntimeError as error:
        raise TransportError(
            f"The ranks of send_sharded() could not {action}: {error}. A rank did not call it in time, ended, or "
            f"failed: look at the other ranks' logs. {consequence}. A process group whose collective failed cannot be "
            "used again."
        ) from error
