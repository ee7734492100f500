"""TorchRL's names for inference engines have its signatures, and work with our engines."""

from __future__ import annotations

import inspect
import os
import shutil
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from engine_server import Beside, EngineServer, equal, serving
from fleet import PATIENCE, small
from skipping import not_tested
from test_signatures import calls_of, members, rendered, takes
from torch import Tensor

from weightsync import (
    AckTimeoutError,
    ConfigurationError,
    EngineError,
    Evidence,
    LayoutError,
    OutcomeKind,
    RefusedError,
    StateError,
    WorkerLostError,
)
from weightsync.schemes.engines.sglang import SGLangEngine
from weightsync.torchrl import llm
from weightsync.torchrl.llm import double_buffer, sglang, vllm

#: Members of ours with additional keyword-only arguments, or with others in place of ignored ones.
MORE = {
    "SGLangWeightSyncScheme.create_receiver",
    "SGLangWeightSyncScheme.create_transport",
    "VLLMCollectiveTransport.__init__",
    "VLLMDoubleBufferSyncScheme.create_transport",
    "VLLMWeightSyncScheme.__init__",
    "VLLMWeightSyncScheme.create_transport",
}


def theirs() -> Any:
    try:
        with warnings.catch_warnings(action="ignore"):
            from torchrl.weight_update import llm as found  # noqa: PLC0415 - takes seconds, and may be missing
    except ImportError as error:
        not_tested("OUR NAMES FOR ENGINES AGAINST TORCHRL'S", f"{error} (pip install 'weightsync[torchrl]')")
    return found


def own(kind: type) -> list[str]:
    """The constructor, and the public members that a class defines itself rather than inherits."""
    base = {name for each in kind.__mro__[1:] for name in vars(each)}
    return [name for name in members(kind) if name == "__init__" or name not in base or name in vars(kind)]


@pytest.mark.torchrl
def test_every_name_of_torchrls_llm_is_here() -> None:
    assert set(llm.__all__) == set(theirs().__all__)


@pytest.mark.torchrl
def test_every_member_of_torchrls_llm_is_here_and_takes_the_same_calls() -> None:
    differing, refused, seen = set(), [], 0
    for name in theirs().__all__:
        kind, ours = getattr(theirs(), name), getattr(llm, name)
        for member in own(kind) if isinstance(kind, type) else ["__call__"]:
            found = getattr(kind, member) if isinstance(kind, type) else kind
            mine = getattr(ours, member) if isinstance(kind, type) else ours
            seen += 1
            if inspect.isfunction(found) and isinstance(kind, type):
                refused += [f"{name}.{member}" for call in calls_of(found) if not takes(inspect.signature(mine), call)]
                differing |= {f"{name}.{member}"} if rendered(found) != rendered(mine) else set()
    assert (refused, differing) == ([], MORE)
    assert seen > 40


# ----------------------------------------------------------------------------------------------------- SGLang


class Collector:
    def __init__(self) -> None:
        self.version = 0

    def increment_version(self) -> None:
        self.version += 1


@pytest.fixture
def server() -> Iterator[EngineServer]:
    with serving() as made:
        yield made


def test_a_program_for_torchrls_sglang_runs(server: EngineServer) -> None:
    scheme, model, collector = llm.SGLangWeightSyncScheme(server.url), small(1.0), Collector()
    sender = scheme.create_sender()
    sender.register_model(model)
    sender.register_collector(collector)
    sender.init_all_workers_group(llm.get_sglang_model_metadata(model))
    report = sender.update_weights()

    assert (report[0].kind, report[0].evidence) == (OutcomeKind.APPLIED, Evidence.CALL)
    assert equal(server, model)
    assert (collector.version, sender.flush_cache(), scheme.create_receiver()) == (1, True, None)
    sender.shutdown()
    with pytest.raises(StateError, match="init_all_workers_group"):
        sender.update_weights()


def test_an_update_that_fails_is_raised_and_no_collector_is_told(server: EngineServer) -> None:
    model, collector = small(1.0), Collector()
    sender = llm.SGLangWeightSyncScheme(server.url, pause_mode="abort").create_sender()
    sender.register_collector(collector)
    sender.init_all_workers_group({})
    server.plan["pause_generation"] = [500]
    with pytest.raises(RefusedError):
        sender.update_weights(model)
    server.plan["update_weights_from_tensor"] = [500]
    with pytest.raises(WorkerLostError):
        sender.update_weights(model)
    assert collector.version == 0
    sender.init_all_workers_group({})
    assert sender.update_weights(model).ok
    sender.shutdown()
    server.plan["flush_cache"] = [400]
    assert not sender.flush_cache()


def test_the_transport_of_sglang_works_alone(server: EngineServer) -> None:
    transport = llm.SGLangCollectiveTransport(
        server.url, "localhost", 1, 0, 2, pause_mode="abort", flush_cache_on_update=False, timeout=PATIENCE
    )
    assert not transport.check_connection()
    transport.init_all_workers_group({})
    assert transport.check_connection()
    assert transport.send_weights("policy", {"a": torch.ones(2)}).ok
    assert "flush_cache" not in server.calls
    server.plan["pause_generation"] = ["die"]
    with pytest.raises(WorkerLostError):
        transport.send_weights("policy", {"a": torch.ones(2)})
    assert not transport.check_connection()
    transport.shutdown()


@pytest.mark.parametrize(
    "make",
    [
        lambda: llm.SGLangCollectiveTransport("http://localhost:1", "localhost", 1, 1, 2),
        lambda: llm.SGLangWeightSyncScheme("http://localhost:1", flush_cache_on_update=True),
        lambda: llm.SGLangWeightSyncScheme("http://localhost:1", pause_mode="wait"),
        lambda: llm.VLLMWeightSyncScheme().create_sender().init_all_workers_group({}, vllm_engine="http://localhost:1"),
        lambda: llm.VLLMDoubleBufferSyncScheme("x").create_receiver(None).apply_weights({}, inplace=False),
        lambda: llm.VLLMDoubleBufferSyncScheme("x").create_sender().register_model({"weight": torch.ones(1)}),
        lambda: llm.VLLMWeightSyncScheme().create_sender().register_model(None),
        lambda: llm.SGLangWeightSyncScheme(None),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_work_is_refused(make: Any) -> None:
    with pytest.raises(ConfigurationError):
        make()


def test_the_engine_is_told_what_the_scheme_of_sglang_was_given(
    server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    def noted(*given: Any, **named: Any) -> Any:
        told.append((*given, {**named, "pause": named["pause"].value}))
        return SGLangEngine(*given, **named)

    monkeypatch.setattr(sglang, "SGLangEngine", noted)
    options = {"pause_mode": "abort", "flush_cache_on_update": True}
    for given in ({}, {"num_gpus": 4, **options}, {"pause_mode": "in_place", "flush_cache_on_update": False}):
        assert llm.SGLangWeightSyncScheme(server.url, **given).create_transport().timeout == 300.0

    assert told == [
        (server.url, {"tp_size": 1, "pause": "retract", "flush_cache": True}),
        (server.url, {"tp_size": 4, "pause": "abort", "flush_cache": True}),
        (server.url, {"tp_size": 1, "pause": "in_place", "flush_cache": False}),
    ]
    transport = llm.SGLangCollectiveTransport(server.url, "localhost", 1, 0, 2, timeout=0.0)
    transport.init_all_workers_group({})
    server.plan["pause_generation"] = ["stall"]
    with pytest.raises(AckTimeoutError):
        transport.send_weights("policy", {"a": torch.ones(2)})
    transport.shutdown()


# ------------------------------------------------------------------------------------------------------- vLLM


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: llm.SGLangWeightSyncScheme("http://localhost:1", num_gpus="2"), r"^num_gpus= is '2': give a whole"),
        (lambda: llm.SGLangCollectiveTransport("http://localhost:1", "a", 1, 0, "2"), r"^world_size= is '2': give"),
        (
            lambda: llm.SGLangCollectiveTransport("http://localhost:1", "a", 1, 0, 2, flush_cache_on_update="no"),
            r"^flush_cache_on_update='no' is not a bool",
        ),
        (lambda: llm.VLLMWeightSyncScheme(gpus_per_replica="2"), r"^gpus_per_replica= is '2': give a whole number"),
        (lambda: llm.VLLMWeightSyncScheme(num_replicas=0), r"^num_replicas= is 0: give a whole number, 1 or more"),
        (lambda: llm.VLLMCollectiveTransport("a", 1, 0, 2, timeout="60"), r"^timeout= is '60': give a number of"),
        (lambda: llm.VLLMWeightSyncScheme(carrier="nccl"), r"^carrier= is 'nccl': give a Carrier"),
        (lambda: llm.VLLMDoubleBufferSyncScheme(None), r"^remote_addr= is None: give the path of the shared dir"),
        (lambda: llm.VLLMDoubleBufferTransport("a", b"b"), r"^local_addr= is b'b': give the path of the shared dir"),
        (lambda: llm.VLLMDoubleBufferSyncScheme("a", num_threads="2"), r"^num_threads= is '2': give a whole number"),
        (
            lambda: llm.VLLMWeightSyncScheme().create_sender().register_collector(None),
            r"^register_collector\(\) was given None, which has no increment_version\(\)",
        ),
    ],
)
def test_an_argument_of_another_type_is_refused_when_it_is_given(make: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        make()


def test_numpys_numbers_and_paths_are_taken(tmp_path: Path) -> None:
    assert llm.SGLangWeightSyncScheme("http://localhost:1", num_gpus=numpy.int64(2)).world_size == 3
    scheme = llm.VLLMDoubleBufferSyncScheme(tmp_path)
    scheme.create_sender().update_weights({"a": torch.ones(2)})
    assert scheme.create_transport().receive_weights()["a"].tolist() == [1.0, 1.0]


def test_a_program_for_torchrls_vllm_runs_with_a_carrier(server: EngineServer) -> None:
    model, carrier = small(1.0), Beside(server)
    scheme = llm.VLLMWeightSyncScheme(carrier=carrier)
    sender, receiver = scheme.create_sender(), scheme.create_receiver(server.url)
    sender.register_model(model)
    metadata = llm.get_model_metadata(model)
    receiver.init_all_workers_group(metadata)
    sender.init_all_workers_group(metadata, vllm_engine=server.url)
    assert sender.update_weights().ok
    assert equal(server, model)
    assert (carrier.joined, receiver.poll_and_apply()) == (1, False)
    assert metadata["0.weight"] == (torch.float32, torch.Size([3, 4]))
    sender.shutdown()


def test_the_carrier_is_made_for_the_group_that_the_scheme_of_vllm_was_given(
    server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def carrier(*given: Any, **named: Any) -> Beside:
        made.append((*given, named))
        return Beside(server)

    monkeypatch.setattr(vllm, "VLLMNCCLCarrier", carrier)
    for given in ({}, {"master_address": "10.0.0.1", "master_port": 9, "device": 5, "gpus_per_replica": 3}):
        sender = llm.VLLMWeightSyncScheme(**given, num_replicas=2).create_sender()
        sender.init_all_workers_group({}, vllm_engine=server.url)
        sender.shutdown()

    assert made == [
        (3, {"master_address": "localhost", "master_port": None, "device": 0}),
        (7, {"master_address": "10.0.0.1", "master_port": 9, "device": 5}),
    ]


class LLM:
    """A stand-in for vLLM's ``LLM`` in this process, including the model whose ``load_weights`` is called."""

    def __init__(self) -> None:
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=self))
        self.llm_engine: Any = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))
        self.held: dict[str, Tensor] = {}
        self.resets = 0
        #: Whether the cache can be reset. None: as in releases of vLLM that return nothing.
        self.forgets: bool | None = None

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        self.held = dict(weights)

    def reset_prefix_cache(self) -> bool | None:
        self.resets += 1
        return self.forgets


class WithRpc(LLM):
    """An ``LLM`` whose workers load the weights."""

    def collective_rpc(self, method: str, args: tuple[str, int]) -> None:
        self.held = dict(double_buffer.TensorDict.load_memmap(args[0]).items())


def test_versions_in_a_directory_are_read_whole_and_once(tmp_path: Path) -> None:
    scheme, model, engine = llm.VLLMDoubleBufferSyncScheme(str(tmp_path / "weights")), small(1.0), LLM()
    sender, receiver = scheme.create_sender(), scheme.create_receiver(engine)
    sender.register_model(model)
    assert not receiver.poll_and_apply(timeout=0)
    for fill in (1.0, 2.0, 3.0):
        torch.nn.init.constant_(model[0].weight, fill)
        sender.update_weights()
        assert receiver.poll_and_apply(timeout=PATIENCE)
        assert all(torch.equal(engine.held[name], value) for name, value in model.state_dict().items())
        assert not receiver.poll_and_apply(timeout=0)
    assert engine.resets == 3
    assert sorted(each.name for each in (tmp_path / "weights").iterdir()) == ["2", "3", "newest"]
    engine.held = {}
    assert scheme.create_receiver(engine.llm_engine).poll_and_apply(timeout=0)  # what an LLM is made of
    assert engine.held.keys() == model.state_dict().keys()


def test_each_end_has_its_own_path_to_the_directory_which_the_trainer_makes(tmp_path: Path) -> None:
    here, there = tmp_path / "a" / "b", tmp_path / "there"
    scheme, engine = llm.VLLMDoubleBufferSyncScheme(here, there), LLM()
    transport = scheme.create_transport()
    assert not transport.check_connection()
    scheme.create_sender().update_weights({"a": torch.ones(2)})
    assert transport.check_connection()
    assert llm.VLLMDoubleBufferTransport(tmp_path / "later").check_connection()
    assert transport.receive_weights() is None
    assert not scheme.create_receiver(engine).poll_and_apply(timeout=0)

    there.symlink_to(here)  # mounted
    assert transport.receive_weights()["a"].tolist() == [1.0, 1.0]
    assert scheme.create_receiver(engine).poll_and_apply(timeout=0)
    assert engine.held["a"].tolist() == [1.0, 1.0]


def test_a_poll_waits_for_a_version_that_is_yet_to_come(tmp_path: Path) -> None:
    scheme, engine = llm.VLLMDoubleBufferSyncScheme(tmp_path), LLM()
    receiver = scheme.create_receiver(engine)
    assert not receiver.poll_and_apply(timeout=0.05)
    later = threading.Timer(0.05, scheme.create_transport().send_weights, ("policy", {"a": torch.ones(2)}))
    later.start()

    assert receiver.poll_and_apply(timeout=PATIENCE)
    later.join()
    assert engine.held["a"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("before", [1, 2])
def test_a_directory_that_was_emptied_holds_nothing_until_its_next_trainer_has_written(
    tmp_path: Path, before: int
) -> None:
    scheme, model, engine = llm.VLLMDoubleBufferSyncScheme(str(tmp_path / "weights")), small(1.0), LLM()
    sender, receiver = scheme.create_sender(), scheme.create_receiver(engine)
    for _ in range(before):
        sender.update_weights(model)
    assert receiver.poll_and_apply(timeout=PATIENCE)

    shutil.rmtree(tmp_path / "weights")
    assert not receiver.poll_and_apply(timeout=0)
    torch.nn.init.constant_(model[0].weight, 2.0)
    scheme.create_sender().update_weights(model)

    assert receiver.poll_and_apply(timeout=PATIENCE)  # although it has the number of the version before
    assert torch.equal(engine.held["0.weight"], model[0].weight)


@pytest.mark.parametrize("kind", [LLM, WithRpc])
def test_a_directory_that_was_emptied_unseen_has_another_version_of_the_same_number(
    tmp_path: Path, kind: type[LLM]
) -> None:
    at = tmp_path / "weights"
    scheme, engine = llm.VLLMDoubleBufferSyncScheme(str(at)), kind()
    receiver = scheme.create_receiver(engine)
    for fill in (1.0, 2.0):
        shutil.rmtree(at, ignore_errors=True)
        scheme.create_transport().send_weights("policy", {"a": torch.full((2,), fill)})
        os.utime(at / "newest", (fill, fill))  # the file system's clock may not have ticked between the writes

        assert receiver.poll_and_apply(timeout=PATIENCE)
        assert engine.held["a"].tolist() == [fill, fill]
        assert not receiver.poll_and_apply(timeout=0)


@pytest.mark.parametrize("kind", [LLM, WithRpc])
def test_a_directory_that_is_emptied_during_a_poll_holds_nothing(
    tmp_path: Path, kind: type[LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    at, engine = tmp_path / "weights", kind()
    scheme, receive = llm.VLLMDoubleBufferSyncScheme(str(at)), llm.VLLMDoubleBufferWeightReceiver._load
    scheme.create_transport().send_weights("policy", {"a": torch.ones(2)})

    def emptied(*given: Any) -> Any:
        shutil.rmtree(at, ignore_errors=True)
        return receive(*given)

    monkeypatch.setattr(llm.VLLMDoubleBufferWeightReceiver, "_load", emptied)
    assert not scheme.create_receiver(engine).poll_and_apply(timeout=0)
    assert engine.held == {}


def test_a_version_that_is_being_written_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = llm.VLLMDoubleBufferTransport(str(tmp_path))
    assert transport.receive_weights() is None
    transport.send_weights("policy", {"a": torch.ones(2)})
    monkeypatch.setattr(Path, "replace", lambda self, to: (_ for _ in ()).throw(OSError("the disk is full")))
    with pytest.raises(OSError, match="the disk is full"):
        transport.send_weights("policy", {"a": torch.zeros(2)})
    monkeypatch.undo()
    found = transport.receive_weights()
    assert found is not None
    assert torch.equal(found["a"], torch.ones(2))
    transport.send_weights("policy", {"a": torch.full((2,), 3.0)})
    assert torch.equal(transport.receive_weights()["a"], torch.full((2,), 3.0))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu])
def test_a_dtype_that_no_reader_could_load_is_refused_and_the_newest_version_stays(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    transport = llm.VLLMDoubleBufferTransport(str(tmp_path))
    transport.send_weights("policy", {"a": {"w": torch.ones(2)}})
    with pytest.raises(LayoutError, match=rf"^'a\.w' has dtype {str(dtype).removeprefix('torch.')}, which") as caught:
        transport.send_weights("policy", {"a": {"w": torch.zeros(2).to(dtype)}})
    assert list(caught.value.mismatched) == ["a.w"]
    found = transport.receive_weights()
    assert found is not None
    assert torch.equal(found["a.w"], torch.ones(2))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", sorted(double_buffer._READABLE, key=str), ids=str)
def test_every_dtype_that_is_written_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    transport, sent = llm.VLLMDoubleBufferTransport(str(tmp_path)), torch.tensor([0, 1]).to(dtype)
    transport.send_weights("policy", {"a": sent})
    found = transport.receive_weights()
    assert found is not None
    assert found["a"].dtype == dtype
    assert found["a"].tolist() == sent.tolist()


@pytest.mark.parametrize("read", [False, True], ids=["before it was read", "after some of it was read"])
def test_a_version_that_is_removed_while_it_is_read_is_left_for_the_newest(
    read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = llm.VLLMDoubleBufferTransport(str(tmp_path))
    transport.send_weights("policy", {"a": torch.ones(2)})
    load, seen = double_buffer.TensorDict.load_memmap, []

    def load_late(at: Path) -> Any:
        seen.append(at.name)
        found = load(at) if read else None
        if len(seen) == 1:
            transport.send_weights("policy", {"a": torch.full((2,), 2.0)})
            transport.send_weights("policy", {"a": torch.full((2,), 3.0)})
            assert not (tmp_path / "1").exists()
        return found if read else load(at)

    monkeypatch.setattr(double_buffer.TensorDict, "load_memmap", load_late)
    found = transport.receive_weights()
    assert found is not None
    assert (seen, found["a"].tolist()) == (["1", "3"], [3.0, 3.0])
    shutil.rmtree(tmp_path / "3")
    with pytest.raises(FileNotFoundError):
        transport.receive_weights()


def test_versions_that_two_threads_write_each_have_a_directory_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both threads used to take the same number, so that readers got parts of both versions."""
    transport, write, threads = llm.VLLMDoubleBufferTransport(str(tmp_path)), double_buffer.TensorDict.memmap, []

    def write_while_another_thread_does(weights: Any, at: Path, **options: Any) -> Any:
        if not threads:
            threads.append(threading.Thread(target=transport.send_weights, args=("policy", {"a": torch.zeros(2)})))
            threads[0].start()
            threads[0].join(0.05)  # without the lock, the thread would have written by then
        return write(weights, at, **options)

    monkeypatch.setattr(double_buffer.TensorDict, "memmap", write_while_another_thread_does)
    transport.send_weights("policy", {"a": torch.ones(2)})
    threads[0].join(PATIENCE)
    assert double_buffer.newest(tmp_path) == 2
    assert [double_buffer.TensorDict.load_memmap(tmp_path / name)["a"].tolist() for name in "12"] == [[1, 1], [0, 0]]


@pytest.mark.parametrize("locks", [True, False])
def test_a_process_writes_no_version_while_another_does(
    locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both processes used to take the same number, so that readers got parts of both versions."""
    transport, write, refused = llm.VLLMDoubleBufferTransport(str(tmp_path)), double_buffer.TensorDict.memmap, []

    def write_while_another_process_does(weights: Any, at: Path, **options: Any) -> Any:
        with monkeypatch.context() as other:
            other.setattr(double_buffer, "_turn", double_buffer._Turn())
            other.setattr(double_buffer.TensorDict, "memmap", write)
            with pytest.raises(ConfigurationError, match="another process") as caught:
                transport.send_weights("policy", {"a": torch.zeros(2)})
            refused.append(caught.value)
        return write(weights, at, **options)

    if locks:
        monkeypatch.setattr(double_buffer.TensorDict, "memmap", write_while_another_process_does)
    else:
        monkeypatch.setattr(double_buffer.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError("no locks")))
    transport.send_weights("policy", {"a": torch.ones(2)})
    transport.send_weights("policy", {"a": torch.ones(2)})
    assert (double_buffer.newest(tmp_path), len(refused)) == (2, 2 * locks)
    assert [double_buffer.TensorDict.load_memmap(tmp_path / name)["a"].tolist() for name in "12"] == [[1, 1], [1, 1]]


def test_a_child_that_is_forked_during_a_write_does_not_keep_the_directory_locked(tmp_path: Path) -> None:
    """Otherwise, if the trainer was killed, no other trainer could write there while the child lived."""
    with double_buffer._locked(tmp_path):
        double_buffer._turn.forget()  # as in the child
        with double_buffer._locked(tmp_path):
            assert len(double_buffer._turn.locked) == 1
    assert not double_buffer._turn.locked


def test_an_engine_with_workers_of_its_own_is_told_which_directory_to_load(tmp_path: Path) -> None:
    found: list[Any] = []

    class WithWorkers(LLM):
        def collective_rpc(self, method: str, args: tuple[str, int]) -> None:
            found.append((method, *args))

    scheme = llm.VLLMDoubleBufferSyncScheme(str(tmp_path), num_threads=2)
    scheme.create_transport().send_weights("policy", {"a": torch.ones(2)})
    assert scheme.create_receiver(WithWorkers()).poll_and_apply(timeout=PATIENCE)
    assert found == [("load_weights_from_storage", str(tmp_path / "1"), 2)]


@pytest.mark.parametrize("kind", [LLM, WithRpc])
def test_a_version_counts_as_loaded_only_once_the_prefix_cache_was_reset(tmp_path: Path, kind: type[LLM]) -> None:
    scheme, engine = llm.VLLMDoubleBufferSyncScheme(str(tmp_path)), kind()
    scheme.create_transport().send_weights("policy", {"a": torch.ones(2)})
    receiver, engine.forgets = scheme.create_receiver(engine), False
    for _ in range(2):
        with pytest.raises(EngineError, match=r"reset_prefix_cache\(\) .* returned False: .* let its requests end"):
            receiver.poll_and_apply(timeout=0)

    engine.forgets = True
    assert receiver.poll_and_apply(timeout=0)
    assert not receiver.poll_and_apply(timeout=0)
    assert (engine.resets, engine.held["a"].tolist()) == (3, [1.0, 1.0])


def test_a_version_that_is_removed_while_an_engines_workers_load_it_does_not_count_as_loaded(tmp_path: Path) -> None:
    transport, loaded = llm.VLLMDoubleBufferTransport(str(tmp_path)), []

    class WithSlowWorkers(LLM):
        def collective_rpc(self, method: str, args: tuple[str, int]) -> None:
            loaded.append(Path(args[0]).name)
            if len(loaded) == 1:
                for fill in (2.0, 3.0):  # the trainer sends on, and removes the version that the workers are loading
                    transport.send_weights("policy", {"a": torch.full((2,), fill)})
            self.held = dict(double_buffer.TensorDict.load_memmap(args[0]).items()) if Path(args[0]).is_dir() else {}

    transport.send_weights("policy", {"a": torch.ones(2)})
    engine = WithSlowWorkers()
    receiver = llm.VLLMDoubleBufferSyncScheme(str(tmp_path)).create_receiver(engine)

    assert receiver.poll_and_apply(timeout=PATIENCE)
    assert loaded == ["1", "3"]
    assert torch.equal(engine.held["a"], torch.full((2,), 3.0))
    assert not receiver.poll_and_apply(timeout=0)
