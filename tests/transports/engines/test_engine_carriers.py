"""Carriers of vLLM's and SGLang's own transfers, with stand-ins for the engines' halves."""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_halves import (
    MEMORY,
    IPCHalf,
    NCCLHalf,
    PosedIPC,
    SGLangHalf,
    Wire,
    install_older_vllm,
    install_sglang,
    install_vllm,
    scheme_with,
)
from engine_server import EngineServer, equal, serving
from fleet import PATIENCE, large, small
from skipping import skip_without_gpus
from torch import nn
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from weightsync import (
    AckTimeoutError,
    Carrier,
    ConfigurationError,
    Evidence,
    OutcomeKind,
    SGLangEngine,
    SGLangNCCLCarrier,
    VLLMEngine,
    VLLMIPCCarrier,
    VLLMNCCLCarrier,
)
from weightsync.schemes.engines.client import Engine
from weightsync.torchrl import llm


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a stand-in for vLLM in the trainer's environment."""
    install_vllm(monkeypatch)
    Wire.hangs.clear()
    Wire.hanging.clear()


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a stand-in for SGLang in the trainer's environment."""
    install_sglang(monkeypatch)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch report a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for name in ("synchronize", "ipc_collect"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)


@pytest.fixture
def server() -> Iterator[EngineServer]:
    with serving() as made:
        yield made
    if made.half is not None:
        made.half.end()


def vllm_over_nccl(server: EngineServer) -> Engine:
    server.half = NCCLHalf()
    return VLLMEngine(server.url, VLLMNCCLCarrier(2, device="cpu"), bucket_bytes=30_000)


def vllm_over_ipc(server: EngineServer) -> Engine:
    server.half = IPCHalf()
    return VLLMEngine(server.url, PosedIPC(), bucket_bytes=30_000)


def sglang_over_nccl(server: EngineServer) -> Engine:
    server.half = SGLangHalf()
    return SGLangEngine(server.url, SGLangNCCLCarrier(2, device="cpu", backend="gloo"), bucket_bytes=30_000)


for_each_carrier = pytest.mark.parametrize(
    ("make", "update"),
    [
        pytest.param(vllm_over_nccl, "update_weights", id="vllm-nccl"),
        pytest.param(vllm_over_ipc, "update_weights", id="vllm-ipc"),
        pytest.param(sglang_over_nccl, "update_weights_from_distributed", id="sglang-nccl"),
    ],
)
pytestmark = pytest.mark.usefixtures("vllm", "sglang")
Make = Callable[[EngineServer], Engine]


# ------------------------------------------------------------------------------------------- all carriers


@for_each_carrier
@pytest.mark.usefixtures("cuda")
def test_each_version_arrives_whole_by_the_engines_own_transfer(make: Make, update: str, server: EngineServer) -> None:
    source = large(1.0)
    with scheme_with(make(server), source, wire_dtype="bfloat16") as scheme:
        for fill in (1.0, 2.0):
            nn.init.constant_(source[0].weight, fill)
            outcome = scheme.get_sender().send(timeout=PATIENCE)[0]
            assert (outcome.kind, outcome.evidence) == (OutcomeKind.APPLIED, Evidence.CALL)
            assert equal(server, source.to(torch.bfloat16))
            source.float()
    assert server.calls.count(update) > 2


@for_each_carrier
@pytest.mark.usefixtures("cuda")
def test_an_engine_that_fails_during_an_update_is_lost_and_can_join_again(
    make: Make, update: str, server: EngineServer
) -> None:
    engine, source = make(server), large(1.0)
    with scheme_with(engine, source) as scheme:
        sender = scheme.get_sender()
        sender.send(timeout=PATIENCE)
        server.plan[update] = ["serve", 500]
        outcome = sender.send(on_failure="report", timeout=PATIENCE)[0]
        assert (outcome.kind, outcome.evidence) == (OutcomeKind.LOST, Evidence.NONE)
        assert "may hold parts of two versions" in outcome.reason
        server.restart()
        sender.add_worker(0, engine)
        assert sender.send(timeout=PATIENCE)[0].kind is OutcomeKind.APPLIED
        assert equal(server, source)


@for_each_carrier
@pytest.mark.usefixtures("cuda")
def test_an_engine_that_stalls_times_out_and_close_ends_the_call(make: Make, update: str, server: EngineServer) -> None:
    with scheme_with(make(server), small(1.0)) as scheme:
        scheme.get_sender().send(timeout=PATIENCE)
        server.plan[update] = ["stall"]
        with pytest.raises(AckTimeoutError):
            scheme.get_sender().send(timeout=0.05)
        assert server.stalled.wait(PATIENCE)
    assert server.hung_up.wait(PATIENCE)


# ------------------------------------------------------------------------------------------- carriers over a group


@pytest.mark.parametrize("make", [vllm_over_nccl, sglang_over_nccl])
def test_a_broadcast_that_hangs_ends_when_the_engine_dies(make: Make, server: EngineServer) -> None:
    with scheme_with(make(server), small(1.0)) as scheme:
        sender = scheme.get_sender()
        sender.send(timeout=PATIENCE)
        Wire.hangs.set()
        update = "update_weights" if make is vllm_over_nccl else "update_weights_from_distributed"
        server.plan[update] = ["stall and die"]
        sender.send_async()
        assert Wire.hanging.wait(PATIENCE)
        assert server.stalled.wait(PATIENCE)
        server.release()
        outcome = sender.wait_async(timeout=PATIENCE, on_failure="report")[0]
        assert outcome.kind is OutcomeKind.LOST
        assert f"{update} got no answer" in outcome.reason, "the cause, and not what followed from it"


@pytest.mark.parametrize("make", [vllm_over_nccl, sglang_over_nccl])
def test_close_ends_a_broadcast_that_hangs(make: Make, server: EngineServer) -> None:
    with scheme_with(make(server), small(1.0)) as scheme:
        scheme.get_sender().send(timeout=PATIENCE)
        Wire.hangs.set()
        scheme.get_sender().send_async()
        assert Wire.hanging.wait(PATIENCE)
    Wire.hangs.clear()
    server.half.end()  # ends the engine's receive, which still waits for the tensors


def test_an_aborted_group_is_not_reused_and_the_next_one_uses_another_port(server: EngineServer) -> None:
    engine = vllm_over_nccl(server)
    with scheme_with(engine, small(1.0)) as scheme:
        sender = scheme.get_sender()
        sender.send(timeout=PATIENCE)
        server.plan["update_weights"] = [500]
        assert sender.send(on_failure="report", timeout=PATIENCE)[0].kind is OutcomeKind.LOST
        sender.add_worker(0, engine)
        assert sender.send(timeout=PATIENCE)[0].kind is OutcomeKind.APPLIED
    first, second = server.half.ports
    assert first != second


def test_a_send_of_a_carrier_without_a_process_group_raises() -> None:
    carrier = VLLMNCCLCarrier(2, device="cpu")
    with pytest.raises(ConnectionError, match=r"process group with the engine was aborted"):
        carrier.send([("a", torch.ones(1))])


def test_a_broadcast_of_a_group_that_is_given_up_raises_even_if_its_end_would_never_come() -> None:
    given_up, endless = threading.Event(), SimpleNamespace(is_completed=lambda: False, wait=lambda: None)
    given_up.set()
    with pytest.raises(ConnectionError, match="the link was closed, during a broadcast"):
        SGLangNCCLCarrier(2, device="cpu", backend="gloo")._wait_until_sent([endless], given_up)


def test_a_group_that_is_joined_after_give_up_is_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    carrier, ended = VLLMNCCLCarrier(2, device="cpu"), []
    carrier.init_info()

    def late(where: dict[str, Any]) -> Any:
        carrier.give_up()
        group = type("Group", (), {"destroy": lambda _: ended.append(where)})
        return group()

    monkeypatch.setattr(carrier, "_join", late)
    with pytest.raises(ConnectionError, match="before all had joined"):
        carrier.join()
    assert len(ended) == 1


def test_a_communicator_that_found_no_nccl_is_not_used(server: EngineServer, monkeypatch: pytest.MonkeyPatch) -> None:
    carrier = VLLMNCCLCarrier(2, device="cpu")
    monkeypatch.setattr(carrier, "_join", lambda _: type("Group", (), {"disabled": True})())
    with scheme_with(VLLMEngine(server.url, carrier), small(1.0)) as scheme:
        outcome = scheme.get_sender().send(on_failure="report", timeout=PATIENCE)[0]
    assert outcome.kind is OutcomeKind.LOST
    assert "found no NCCL library" in outcome.reason


def test_a_group_is_joined_through_the_function_of_older_vllm_releases(
    monkeypatch: pytest.MonkeyPatch, server: EngineServer
) -> None:
    monkeypatch.delitem(sys.modules, "vllm.distributed.weight_transfer.nccl_common")
    install_older_vllm(monkeypatch)
    source = small(1.0)
    with scheme_with(vllm_over_nccl(server), source) as scheme:
        assert scheme.get_sender().send(timeout=PATIENCE).ok
    assert equal(server, source)


def test_torchrls_vllm_scheme_uses_vllms_own_transfer_by_default(server: EngineServer) -> None:
    server.half, model = NCCLHalf(), small(1.0)
    sender = llm.VLLMWeightSyncScheme(device="cpu").create_sender()
    sender.init_all_workers_group(llm.get_model_metadata(model), vllm_engine=server.url)
    assert sender.update_weights(model).ok
    assert equal(server, model)
    sender.shutdown()


# ------------------------------------------------------------------------------ carriers over the trainer's memory


class Handle:
    """A fake engine in this process, with vLLM's methods and its half of "ipc"."""

    def __init__(self) -> None:
        self.half, self.weights = IPCHalf(), {}

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        self.half.init(request["init_info"])

    def start_weight_update(self) -> None:
        """Do nothing."""

    def update_weights(self, request: dict[str, Any]) -> None:
        assert "ipc_handles" in request["update_info"], "handles are pickled only for HTTP calls"
        self.half.receive(request["update_info"])

    def finish_weight_update(self) -> None:
        self.weights = dict(self.half.finish())


@pytest.mark.usefixtures("cuda")
def test_an_in_process_engine_gets_unpickled_ipc_handles_and_their_memory_is_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handle, source = Handle(), large(1.0)
    update, copied, freed = handle.update_weights, list[Any](), list[bool]()

    def update_weights(request: dict[str, Any]) -> None:
        assert copied, "the engine reads the copies from another process"
        copied.clear()
        update(request)

    monkeypatch.setattr(torch.cuda, "synchronize", copied.append)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: freed.append(MEMORY == {}))
    monkeypatch.setattr(handle, "update_weights", update_weights)
    with scheme_with(VLLMEngine(handle, PosedIPC(), bucket_bytes=30_000), source) as scheme:
        assert scheme.get_sender().send(timeout=PATIENCE).ok
    assert all(torch.equal(handle.weights[name], tensor) for name, tensor in source.state_dict().items())
    assert dict(MEMORY) == {}
    assert freed == [True]


@pytest.mark.usefixtures("cuda")
def test_the_exported_memory_is_freed_when_an_engine_fails(server: EngineServer) -> None:
    engine = vllm_over_ipc(server)
    server.plan["update_weights"] = [500]
    with scheme_with(engine, small(1.0)) as scheme:
        assert scheme.get_sender().send(on_failure="report", timeout=PATIENCE)[0].kind is OutcomeKind.LOST
        assert dict(MEMORY) == {}


@pytest.mark.usefixtures("cuda")
def test_an_ipc_carrier_copies_to_the_gpus_that_it_is_given() -> None:
    assert VLLMIPCCarrier(["cuda:1", 0])._devices == [torch.device("cuda:1"), torch.device("cuda:0")]
    assert VLLMIPCCarrier()._devices == [torch.device("cuda:0")]


# ------------------------------------------------------------------------------------ missing devices and packages


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: VLLMNCCLCarrier(2), r"VLLMNCCLCarrier needs a CUDA device .* without a carrier"),
        (lambda: SGLangNCCLCarrier(2), r"SGLangNCCLCarrier needs a CUDA device"),
        (VLLMIPCCarrier, r"VLLMIPCCarrier needs a CUDA device"),
        (lambda: VLLMIPCCarrier(["cpu"]), r"give a list of the GPUs"),
        (lambda: VLLMIPCCarrier([]), r"give a list of the GPUs"),
        (lambda: VLLMNCCLCarrier(1, device="cpu"), r"world_size= is 1: it counts the trainer"),
        (lambda: VLLMNCCLCarrier("2", device="cpu"), r"world_size= is '2': it counts the trainer"),
        (lambda: VLLMNCCLCarrier(2, master_port="1", device="cpu"), r"master_port= is '1': give the number of a port"),
    ],
)
def test_a_carrier_without_a_cuda_device_or_with_bad_arguments_is_refused_at_construction(
    make: Callable[[], Carrier], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match=match):
        make()


@pytest.mark.parametrize(("carrier", "package"), [(VLLMNCCLCarrier, "vllm"), (SGLangNCCLCarrier, "sglang")])
def test_a_carrier_whose_engine_package_is_missing_is_refused_with_the_remedy(
    carrier: Callable[..., Carrier], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("vllm.distributed.weight_transfer.nccl_common", "sglang.srt.utils"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigurationError, match=rf"Install the engine's release of {package} in the trainer"):
        carrier(2, device="cpu")


# ------------------------------------------------------------------------------------------ with the real packages


@pytest.mark.gpu
def test_vllms_own_communicator_carries_a_bucket_between_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    if torch.cuda.device_count() < 2 or importlib.util.find_spec("vllm") is None:
        skip_without_gpus("VLLM'S COMMUNICATOR", "it wants vLLM, and a GPU for each of two ranks")
    carrier = VLLMNCCLCarrier(2, device=0)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    peer = context.Process(target=be_a_worker_of_vllm, args=(theirs, dict(carrier.init_info())))
    peer.start()
    carrier.join()
    carrier.send([("a", torch.arange(5.0)), ("b", torch.ones(3, 2, dtype=torch.bfloat16))])
    assert ours.poll(PATIENCE)
    assert ours.recv() == [10.0, 6.0]
    carrier.give_up()
    peer.join(PATIENCE)


def be_a_worker_of_vllm(pipe: Any, info: dict[str, Any]) -> None:
    common = importlib.import_module("vllm.distributed.weight_transfer.nccl_common")
    torch.cuda.set_device(1)
    group = common.stateless_init_process_group(info["master_address"], info["master_port"], 1, info["world_size"], 1)
    found = [torch.empty(5, device="cuda:1"), torch.empty(3, 2, dtype=torch.bfloat16, device="cuda:1")]
    for tensor in found:
        group.broadcast(tensor, src=0)
    torch.cuda.synchronize()
    pipe.send([tensor.sum().item() for tensor in found])


@pytest.mark.gpu
def test_another_process_reads_an_exported_tensor_from_the_gpu() -> None:
    if not torch.cuda.is_available():
        skip_without_gpus("VLLM'S IPC", "there is no CUDA device")
    carrier = VLLMIPCCarrier()
    info = carrier.update_info([("a", torch.arange(5.0)), ("b", torch.ones(3, 2))])
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    peer = context.Process(target=read_exported, args=(theirs, info["ipc_handles"]))
    peer.start()
    assert ours.poll(PATIENCE)
    assert ours.recv() == [10.0, 6.0]
    peer.join(PATIENCE)
    carrier.done()


def read_exported(pipe: Any, handles: list[dict[str, tuple[Any, ...]]]) -> None:
    """Read the handles as vLLM's worker does. The device, the seventh argument, may have another number there."""
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    sums = []
    for handle in handles:
        arguments = list(handle[uuid])
        arguments[6] = 0
        tensor = rebuild_cuda_tensor(*arguments)
        sums.append(tensor.sum().item())
    pipe.send(sums)
