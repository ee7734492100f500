"""`send_sharded`: FSDP2 over gloo on two ranks. Whole weights reach a worker, and every rank learns its outcome."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fleet import PATIENCE, Crew, Worker, WorkerSetup
from tensordict import TensorDict
from torch import nn

from weightsync import (
    ConfigurationError,
    LayoutError,
    MultiProcessWeightSyncScheme,
    OnFailure,
    OutcomeKind,
    RefusedError,
    SenderClosed,
    StateError,
    SyncError,
    SyncReport,
    TransportError,
    send_sharded,
)
from weightsync.clock import Deadline
from weightsync.protocol.report import Outcome
from weightsync.protocol.report_codec import encode_report
from weightsync.schemes.sharded import GRACE, _failure_of, _Limit, _report_from_sender
from weightsync.weights.reading import read_weights
from weightsync.weights.sharded import ShardedWeights

pytestmark = pytest.mark.gloo


def model(seed: int = 0) -> nn.Module:
    """A model with layers of 5 and 3 rows: two ranks get shards of unequal sizes. The buffers are not sharded."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def enter(setup: WorkerSetup, file: str, rank: int) -> None:
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - in the rank only: it takes long

    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    setup.model = fully_shard(model())
    if rank == 0:
        setup.scheme.init_on_sender("policy", pipes=[setup.pipe])


def connect(setup: WorkerSetup) -> None:
    setup.scheme.connect(timeout=PATIENCE)


def send(setup: WorkerSetup, timeout: float = PATIENCE, on_failure: str = "raise") -> Any:
    return send_sharded(setup.scheme, setup.model, timeout=timeout, on_failure=on_failure)


def double(setup: WorkerSetup) -> None:
    """Change the shards after a forward pass has made the parameters whole, so that the parameters are outdated."""
    shards = list(setup.model.parameters())
    with torch.no_grad():
        setup.model.eval()(torch.ones(1, 4))
        for shard in shards:
            shard.to_local().mul_(2)


def register_shards(setup: WorkerSetup) -> list[str]:
    """Initialise schemes with the shards of this rank, given in each form. Returns the errors."""
    held = dict(setup.model.named_parameters())
    forms: list[tuple[str, Any]] = [
        ("model", setup.model),
        ("weights", held),
        ("weights", {"inner": held}),
        ("source_model", TensorDict(held)),
        ("source_model", TensorDict({"inner": held})),
        ("cached_weights", held),
    ]
    errors = []
    for name, source in forms:
        scheme = MultiProcessWeightSyncScheme()
        with pytest.raises(ConfigurationError, match=f"^{name}= is sharded over ranks") as caught:
            scheme.init_on_sender("policy", num_workers=1, **{name: source})
        assert not scheme.initialized_on_sender
        errors.append(str(caught.value))
    return errors


def send_alone(setup: WorkerSetup) -> None:
    setup.scheme.send(setup.model)


def send_shards(setup: WorkerSetup) -> None:
    setup.scheme.send({name: tensor.detach() for name, tensor in setup.model.named_parameters()})


def read_flattened(_setup: WorkerSetup) -> str:
    """The error of reading a module that is sharded by FSDP's first generation."""
    from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415

    wrapped = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    with pytest.raises(LayoutError) as caught:
        read_weights(nn.Sequential(wrapped))
    return str(caught.value)


def send_another(setup: WorkerSetup) -> None:
    send_sharded(setup.scheme, {"other": torch.zeros(3)}, timeout=PATIENCE)


def send_with_inconsistent_placements(setup: WorkerSetup, rank: int) -> None:
    """Send two tensors of one mesh. The first is sharded on one rank, and whole on the other."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh  # noqa: PLC0415

    mesh = init_device_mesh("cpu", (2,))
    shard = DTensor.from_local(torch.full((1, 2), float(rank)), mesh, [Shard(0)])
    whole = DTensor.from_local(torch.ones(2, 2), mesh, [Replicate()], run_check=False)
    send_sharded(setup.scheme, {"a": whole if rank == 0 else shard, "b": shard}, timeout=PATIENCE)


def send_replica(setup: WorkerSetup) -> Any:
    """Send a replica that each rank shards over its own mesh: data parallel, with tensor parallelism of size 1."""
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh  # noqa: PLC0415

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["tp"]
    state = model(2).state_dict()
    held = {name: DTensor.from_local(each, mesh, [Shard(0)]) if each.dim() else each for name, each in state.items()}
    return send_sharded(setup.scheme, held, timeout=PATIENCE)


def send_offloaded(setup: WorkerSetup, rank: int) -> Any:
    """Send shards on the CPU whose mesh communicates only on GPUs, as FSDP2 offloads them over NCCL.

    There is no GPU: a tensor that would be moved to one goes to a mesh on the CPU.
    """
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh  # noqa: PLC0415
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # noqa: PLC0415

    gpus = DeviceMesh.from_group(dist.new_group(backend="cuda:gloo"), "cuda", mesh=torch.tensor([0, 1]))
    cpus = init_device_mesh("cpu", (2,))
    spec = DTensorSpec(gpus, (Shard(0),), tensor_meta=TensorMeta(torch.Size((4,)), (1,), torch.float32))
    offloaded = DTensor(torch.full((2,), float(rank)), spec, requires_grad=False)

    def to(tensor: Any, device: str) -> Any:
        assert device == "cuda"
        return DTensor.from_local(tensor.to_local(), cpus, [Shard(0)], run_check=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "to", to)
        return send_sharded(setup.scheme, {"bias": offloaded}, timeout=PATIENCE)


def send_within_another_group(setup: WorkerSetup, rank: int) -> None:
    group = dist.new_group([0])
    if rank == 1:
        send_sharded(None, setup.model, group=group, timeout=PATIENCE)


class Counted(nn.Linear):
    """Has extra state."""

    count = 0

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


def send_counted(setup: WorkerSetup, rank: int, alone: bool) -> Any:
    """Send from a group that has rank 0 alone, or from all ranks."""
    torch.manual_seed(3)
    counted = Counted(2, 2)
    counted.count = 7
    group = dist.new_group([0]) if alone else None
    if rank == 0 or not alone:
        return send_sharded(setup.scheme, nn.Sequential(counted), group=group, timeout=PATIENCE)
    return None


def send_meta_tensor(setup: WorkerSetup) -> None:
    send_sharded(setup.scheme, {"other": torch.zeros(3, device="meta")}, timeout=PATIENCE)


def time_left(setup: WorkerSetup) -> float:
    """The timeout of the send itself; 0: this rank sends nothing."""
    shipped, given = MultiProcessWeightSyncScheme.send, []

    def noted(*arguments: Any, **options: Any) -> Any:
        given.append(options.get("timeout"))
        return shipped(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MultiProcessWeightSyncScheme, "send", noted)
        send(setup)
    return given[0] if given else 0.0


def send_to_another(setup: WorkerSetup) -> None:
    send_sharded(setup.scheme, setup.model, 7, timeout=PATIENCE)


def send_closed(setup: WorkerSetup) -> None:
    setup.scheme.close()
    send(setup)


def send_unconnected(setup: WorkerSetup, rank: int) -> None:
    with MultiProcessWeightSyncScheme() as scheme:
        if rank == 0:
            scheme.init_on_sender("policy", num_workers=1)
        send_sharded(scheme, setup.model, timeout=PATIENCE)


class Unreadable(nn.Module):
    """A module whose extra state cannot be read."""

    def get_extra_state(self) -> object:
        raise OSError("no state")

    def set_extra_state(self, state: object) -> None:
        pass


def send_unreadable(setup: WorkerSetup, rank: int, reads: int) -> Any:
    if rank == reads:
        setup.model.append(Unreadable())
    return send(setup)


def send_with_a_scheme_on_every_rank(setup: WorkerSetup, rank: int) -> None:
    scheme = MultiProcessWeightSyncScheme()
    scheme.init_on_sender("policy", num_workers=1)
    with scheme:
        send_sharded(scheme, setup.model, timeout=PATIENCE)


def fail_while_gathering(setup: WorkerSetup, dies: bool) -> str:
    """Fail at the second tensor: raise, or kill the process."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    whole, calls = DTensor.full_tensor, []

    def full_tensor(tensor: Any) -> torch.Tensor:
        calls.append(tensor)
        if len(calls) == 2 and dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory for a whole tensor")
        return whole(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", full_tensor)
        with pytest.raises(TransportError, match="no memory for a whole tensor"):
            send(setup)
    return "raised"


def gathers_among(setup: WorkerSetup) -> list[list[int]]:
    return [dist.get_process_group_ranks(group) for group in ShardedWeights(setup.model).groups]


def timeouts(setup: WorkerSetup) -> float:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    return backend.options._timeout.total_seconds()


class Ranks:
    """Two ranks of a trainer, and a worker in this process."""

    def __init__(self, crew: Crew, folder: Path, destination: nn.Module | None = None) -> None:
        self.ranks: list[Worker] = crew.start(MultiProcessWeightSyncScheme(), 2)
        for rank, each in enumerate(self.ranks):
            each.tell(enter, str(folder / "meet"), rank)
        self.model = model(1) if destination is None else destination
        self.scheme = MultiProcessWeightSyncScheme()
        self.scheme.init_on_worker("policy", pipe=self.ranks[0].pipe, model=self.model)
        for each in self.ranks:
            each.answer()
        self.ranks[0].tell(connect)
        self.receive()
        self.ranks[0].answer()

    def receive(self) -> None:
        """Receive until rank 0 has answered."""
        while not self.ranks[0].answered():
            with contextlib.suppress(SenderClosed):
                self.scheme.get_receiver().receive(timeout=0.01)

    def do(self, function: Any, *arguments: Any) -> list[Any]:
        """Call a function in both ranks. Returns their results, or errors in place of results."""
        for each in self.ranks:
            each.tell(function, *arguments)
        self.receive()
        return [_outcome(each) for each in self.ranks]


def _outcome(rank: Worker) -> Any:
    try:
        return rank.answer()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return error


@pytest.fixture
def ranks(crew: Crew, tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(crew, tmp_path)
    yield made
    made.scheme.close()


def test_whole_weights_reach_the_worker_and_every_rank_returns_the_report(ranks: Ranks) -> None:
    assert ranks.do(gathers_among) == [[[0, 1]], [[0, 1]]]
    ordinary = ranks.do(timeouts)
    first = ranks.do(send)

    assert [(report.version, report.ok, report.sent_by_rank) for report in first] == [(1, True, 0), (1, True, 0)]
    assert str(first[1]).endswith(", sent by rank 0")
    assert first[0].outcomes == first[1].outcomes
    want = model().state_dict()
    assert all(torch.equal(tensor, want[name]) for name, tensor in ranks.model.state_dict().items())

    ranks.do(double)
    assert [report.version for report in ranks.do(send)] == [2, 2]
    for name, tensor in ranks.model.named_parameters():
        assert torch.equal(tensor, 2 * want[name]), name
    left, nothing = ranks.do(time_left)
    assert 0.0 < left <= PATIENCE
    assert nothing == 0.0
    assert ranks.do(timeouts) == ordinary


def test_send_refuses_shards_and_advises_send_sharded(ranks: Ranks) -> None:
    with pytest.raises(LayoutError, match=r"'0\.weight' is a DTensor.*weightsync\.send_sharded\(\) on every rank"):
        ranks.ranks[0].do(send_shards)
    ranks.do(double)  # the parameters are whole now, and older than the shards
    with pytest.raises(LayoutError, match=r"wrapped by fully_shard.*weightsync\.send_sharded\(\) on every rank"):
        ranks.ranks[0].do(send_alone)

    for said in ranks.do(read_flattened):
        assert re.search(r"'0' .*shards its parameters .*fully_shard\(\)", said)

    assert [report.version for report in ranks.do(send)] == [1, 1]


def test_init_on_sender_refuses_shards_as_its_source_of_weights(ranks: Ranks) -> None:
    errors = ranks.ranks[0].do(register_shards)
    assert len(errors) == 6
    assert all("weightsync.send_sharded(scheme, model) on every rank" in each for each in errors)
    assert [report.version for report in ranks.do(send)] == [1, 1]


def test_ranks_with_inconsistent_weights_or_schemes_all_raise_and_send_nothing(ranks: Ranks) -> None:
    ranks.ranks[1].tell(send_another)
    ranks.ranks[0].tell(send)
    ranks.receive()
    found = [_outcome(each) for each in ranks.ranks]
    assert [type(error) for error in found] == [LayoutError, LayoutError]
    assert "Ranks [1] hold a model with other names" in str(found[0])

    ranks.ranks[1].tell(send_meta_tensor)
    ranks.ranks[0].tell(send)
    ranks.receive()
    found = [_outcome(each) for each in ranks.ranks]
    assert [type(error) for error in found] == [LayoutError, LayoutError]
    assert "Ranks [1] hold weights that cannot be sent" in str(found[0])
    assert "'other' is on the meta device" in str(found[1])

    ranks.ranks[1].tell(send_with_a_scheme_on_every_rank, 1)
    ranks.ranks[0].tell(send)
    ranks.receive()
    found = [_outcome(each) for each in ranks.ranks]
    assert [type(error) for error in found] == [ConfigurationError, ConfigurationError]
    assert "Ranks [0, 1] gave a scheme" in str(found[0])

    assert [report.version for report in ranks.do(send)] == [1, 1]


def test_ranks_that_place_a_tensor_differently_all_raise_and_send_nothing(ranks: Ranks) -> None:
    for rank, each in enumerate(ranks.ranks):
        each.tell(send_with_inconsistent_placements, rank)
    ranks.receive()
    found = [_outcome(each) for each in ranks.ranks]
    assert [type(error) for error in found] == [LayoutError, LayoutError]
    assert "meshes or placements" in str(found[0])
    assert [report.version for report in ranks.do(send)] == [1, 1]


def test_replicas_sharded_over_their_own_meshes_are_sent(ranks: Ranks) -> None:
    assert [(report.version, report.ok) for report in ranks.do(send_replica)] == [(1, True), (1, True)]
    want = model(2).state_dict()
    assert all(torch.equal(tensor, want[name]) for name, tensor in ranks.model.state_dict().items())


def test_offloaded_shards_are_gathered_on_the_device_of_their_mesh(crew: Crew, tmp_path: Path) -> None:
    destination = nn.Module()
    destination.bias = nn.Parameter(torch.zeros(4))
    ranks = Ranks(crew, tmp_path, destination)
    for rank, each in enumerate(ranks.ranks):
        each.tell(send_offloaded, rank)
    ranks.receive()
    assert [_outcome(each).ok for each in ranks.ranks] == [True, True]
    assert destination.bias.tolist() == [0.0, 0.0, 1.0, 1.0]
    ranks.scheme.close()


def test_send_sharded_raises_on_a_rank_outside_of_the_group(ranks: Ranks) -> None:
    for rank, each in enumerate(ranks.ranks):
        each.tell(send_within_another_group, rank)
    ranks.receive()
    found = [_outcome(each) for each in ranks.ranks]
    assert found[0] is None
    assert isinstance(found[1], ConfigurationError)
    assert "not in the process group" in str(found[1])


def test_a_group_of_some_ranks_sends_without_the_others(crew: Crew, tmp_path: Path) -> None:
    destination = nn.Sequential(Counted(2, 2))
    ranks = Ranks(crew, tmp_path, destination)
    for alone in (True, False):
        for rank, each in enumerate(ranks.ranks):
            each.tell(send_counted, rank, alone)
        ranks.receive()
        found = [_outcome(each) for each in ranks.ranks]
        assert found[0].ok
        assert found[1] is None if alone else found[1].ok

    assert destination[0].count == 7
    ranks.scheme.close()


def test_a_failed_send_is_raised_on_every_rank(crew: Crew, tmp_path: Path) -> None:
    ranks = Ranks(crew, tmp_path, nn.Linear(2, 2))
    reports = ranks.do(send, PATIENCE, "report")
    assert [report[0].kind for report in reports] == [OutcomeKind.REFUSED, OutcomeKind.REFUSED]
    assert [type(error) for error in ranks.do(send)] == [RefusedError, RefusedError]

    found = ranks.do(send_to_another)
    assert [type(error) for error in found] == [ConfigurationError, SyncError]
    assert "7" in str(found[0])
    assert str(found[0]) in str(found[1])

    found = ranks.do(send_closed)
    assert type(found[1]) is SyncError
    assert f"{type(found[0]).__name__}: {found[0]}" in str(found[1])
    ranks.scheme.close()


def test_an_unconnected_scheme_raises_on_every_rank(ranks: Ranks) -> None:
    for rank, each in enumerate(ranks.ranks):
        each.tell(send_unconnected, rank)
    found = [_outcome(each) for each in ranks.ranks]
    assert [type(error) for error in found] == [StateError, SyncError]
    assert "send_sharded(): the scheme (sender) is not connected and allows connect()" in str(found[0])
    assert str(found[0]) in str(found[1])
    assert [report.version for report in ranks.do(send)] == [1, 1]


def test_unreadable_extra_state_fails_all_ranks_and_is_read_on_the_sending_rank_only(
    ranks: Ranks,
) -> None:
    for reads in (1, 0):
        for rank, each in enumerate(ranks.ranks):
            each.tell(send_unreadable, rank, reads)
        ranks.receive()
        found = [_outcome(each) for each in ranks.ranks]
        if reads == 1:
            assert [report[0].kind for report in found] == [OutcomeKind.APPLIED, OutcomeKind.APPLIED]
    assert "no state" in str(found[0])
    assert type(found[1]) is SyncError
    assert f"{type(found[0]).__name__}: {found[0]}" in str(found[1])


@pytest.mark.parametrize("dies", [False, True], ids=["raises", "is killed"])
def test_a_rank_that_fails_during_a_collective_fails_the_others(ranks: Ranks, dies: bool) -> None:
    ranks.ranks[1].tell(fail_while_gathering, dies)
    ranks.ranks[0].tell(send)
    if dies:
        ranks.ranks[1].process.join(PATIENCE)
    else:
        assert ranks.ranks[1].answer() == "raised"
    ranks.ranks[1].kill()  # otherwise the other rank would wait for its deadline

    with pytest.raises(TransportError, match=r"could not gather the weights: .*\. Nothing was sent\.") as caught:
        ranks.ranks[0].answer()
    assert "cannot be used again" in str(caught.value)
    assert ranks.scheme.get_receiver().version is None


def test_send_sharded_raises_at_the_deadline_if_a_rank_does_not_call_it(ranks: Ranks) -> None:
    with pytest.raises(TransportError, match=r"could not compare what the ranks hold: .*\. Nothing was sent\."):
        ranks.ranks[0].do(send, 0.3)


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.empty(2, device="meta"), "is on the meta device"),
        (torch.empty(2, dtype=torch.bits8), "has the dtype torch.bits8, which cannot be sent"),
    ],
    ids=["meta", "bits8"],
)
def test_weights_that_cannot_be_sent_even_unsharded_are_refused_by_name(tensor: torch.Tensor, said: str) -> None:
    with pytest.raises(LayoutError, match=f"^'b' {said}") as caught:
        ShardedWeights({"a": torch.ones(2), "b": tensor})
    assert said in caught.value.mismatched["b"]


def test_send_sharded_without_a_process_group_advises_init_process_group() -> None:
    with pytest.raises(ConfigurationError, match="init_process_group"):
        send_sharded(None, nn.Linear(1, 1))


def test_other_ranks_raise_for_the_failure_of_the_previous_update() -> None:
    refused, applied = ({0: Outcome(kind=kind)} for kind in (OutcomeKind.REFUSED, OutcomeKind.APPLIED))
    before = SyncReport(model_id="policy", version=1, incarnation=1, outcomes=refused)
    report = SyncReport(model_id="policy", version=2, incarnation=1, outcomes=applied, previous=before)
    sent = {"report": encode_report(report).decode(), "error": _failure_of(report)}

    with pytest.raises(SyncError, match=re.escape(str(report.error()))) as caught:
        _report_from_sender(sent, 3, OnFailure.RAISE)
    assert (caught.value.report.version, caught.value.report.sent_by_rank) == (2, 3)
    assert _report_from_sender(sent, 3, OnFailure.REPORT) == caught.value.report


def test_collectives_are_limited_to_the_time_left_plus_a_grace_for_the_report() -> None:
    given: list[float] = []
    backend = SimpleNamespace(_set_default_timeout=lambda timeout: given.append(timeout.total_seconds()))

    for deadline, grace in ((5.0, ()), (5.0, (GRACE,)), (0.0, ()), (None, (GRACE,))):
        _Limit([backend], Deadline(deadline))(*grace)

    left, with_grace, over = given
    assert 0.0 < left <= 5.0
    assert 10.0 < with_grace <= 15.0
    assert over == 0.001
