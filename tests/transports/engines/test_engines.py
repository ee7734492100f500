"""Engines behind HTTP routes: each outcome is typed, and claims no more than the calls have shown."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from http.client import IncompleteRead
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_halves import scheme_with
from engine_server import Beside, EngineServer, Inline, equal, serving
from fleet import PATIENCE, large, small
from skipping import require_modules
from torch import nn

from weightsync import (
    AckTimeoutError,
    ConfigurationError,
    EngineWeightSyncScheme,
    Evidence,
    OutcomeKind,
    PartlyLoadedError,
    SGLangEngine,
    VLLMEngine,
    WorkerLostError,
)
from weightsync.clock import Deadline
from weightsync.schemes.engines import client, http
from weightsync.schemes.engines.carrier import call_while_carrying
from weightsync.schemes.engines.client import Engine, group_into_buckets

KINDS = {
    "vllm": (lambda url, **options: VLLMEngine(url, Inline(), **options), "update_weights", "pause?mode=keep"),
    "sglang": (SGLangEngine, "update_weights_from_tensor", "pause_generation"),
}


class World:
    """A trainer, its engines, and a fake server."""

    def __init__(self, make: Callable[..., Engine], update: str, pause: str) -> None:
        self.make, self.update, self.pause = make, update, pause
        self.server = EngineServer()
        self.source: nn.Module = small(1.0)

    def start(self, *engines: Engine, source: nn.Module | None = None, **options: Any) -> EngineWeightSyncScheme:
        self.source = source or self.source
        self.scheme = EngineWeightSyncScheme(**options)
        self.scheme.init_on_sender("policy", engines=engines or [self.make(self.server.url)], model=self.source)
        self.sender = self.scheme.get_sender()
        return self.scheme

    def outcome(self, **options: Any) -> Any:
        return self.sender.send(on_failure="report", timeout=PATIENCE, **options)[0]


def open_sockets_and_threads() -> tuple[int, list[str]]:
    """The number of open sockets, and the names of the running weightsync threads."""
    names = sorted(each.name for each in threading.enumerate() if each.name.startswith("weightsync"))
    sockets = 0
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            sockets += str(each.readlink()).startswith("socket:")
    return sockets, names


@pytest.fixture(params=list(KINDS))
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A world with an engine of each kind. Checks that no socket and no thread outlives the test."""
    sockets, threads = open_sockets_and_threads()
    made = World(*KINDS[request.param])
    yield made
    made.scheme.close()
    made.server.die()
    # Ray, if this process is connected to a cluster, opens and closes a few sockets meanwhile.
    waited = Deadline(10.0)
    while open_sockets_and_threads()[0] > sockets and not waited.passed:
        time.sleep(0.05)
    sockets_after, threads_after = open_sockets_and_threads()
    assert sockets_after <= sockets, "what an earlier test has left may have gone meanwhile"
    assert not Counter(threads_after) - Counter(threads)


def test_an_engine_that_answered_every_call_has_applied_the_version_with_call_evidence(world: World) -> None:
    engine = world.make(world.server.url)
    world.start(engine)
    nn.init.normal_(world.source[0].weight)
    outcome = world.outcome()

    assert (outcome.kind, outcome.evidence) == (OutcomeKind.APPLIED, Evidence.CALL)
    assert engine.awaited == ""
    assert outcome.apply_s > 0
    assert equal(world.server, world.source)
    assert world.server.version == f"{world.sender.incarnation}.1"
    assert (world.server.calls[-1], world.server.paused) == (
        "resume" if world.update == "update_weights" else "continue_generation",
        False,
    )
    nn.init.normal_(world.source[0].weight)
    assert world.outcome().kind is OutcomeKind.APPLIED
    assert equal(world.server, world.source)
    assert world.server.calls.count("init_weight_transfer_engine") <= 1


def test_weights_go_in_buckets_of_bounded_size(world: World) -> None:
    world.start(world.make(world.server.url, bucket_bytes=100_000), source=large(1.0))
    assert world.outcome().kind is OutcomeKind.APPLIED
    assert equal(world.server, world.source)
    assert len(world.server.sizes) > 1
    assert max(world.server.sizes) <= 100_000


def test_an_engine_gets_its_own_names_and_the_wire_dtype(world: World) -> None:
    world.start(world.make(world.server.url, name_map={"0.weight": "embed"}), wire_dtype="bfloat16")
    assert world.outcome().kind is OutcomeKind.APPLIED
    assert "embed" in world.server.weights
    assert "0.weight" not in world.server.weights
    assert {tensor.dtype for tensor in world.server.weights.values()} == {torch.bfloat16, torch.int64}


def test_an_engine_that_fails_during_an_update_is_lost_and_stays_paused(world: World) -> None:
    world.start(world.make(world.server.url, bucket_bytes=100_000), source=large(1.0))
    world.server.plan[world.update] = ["serve", 500]
    outcome = world.outcome()

    assert (outcome.kind, outcome.evidence) == (OutcomeKind.LOST, Evidence.NONE)
    assert "may hold parts of two versions, and stays paused: POST" in outcome.reason
    assert outcome.reason.endswith("Start it again before you call add_worker() for it.")
    assert world.server.paused
    assert world.server.weights != {}


def test_an_unreachable_engine_is_lost(world: World) -> None:
    world.start()
    world.server.die()
    with pytest.raises(WorkerLostError, match=r"ConnectionRefusedError.*still runs, it has the weights that it had\."):
        world.sender.send(timeout=PATIENCE)


def test_close_ends_a_stalled_call_with_its_thread_and_its_socket(world: World) -> None:
    world.start()
    world.server.plan[world.update] = ["stall"]
    world.sender.send_async()
    assert world.server.stalled.wait(PATIENCE)
    world.scheme.close()
    assert world.server.hung_up.wait(PATIENCE)
    assert open_sockets_and_threads()[1] == []


def test_an_engine_may_take_longer_to_answer_than_to_connect(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CONNECT_SECONDS", 0.3)
    world.start()
    world.server.plan[world.update] = ["stall"]
    world.sender.send_async()
    assert world.server.stalled.wait(PATIENCE)
    assert not world.server.hung_up.wait(0.4)
    world.server.release()
    assert world.sender.wait_async(timeout=PATIENCE).ok


def test_close_during_a_load_logs_the_state_of_the_engine(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.start()
    world.server.plan[world.update] = ["stall"]
    world.sender.send_async()
    assert world.server.stalled.wait(PATIENCE)
    world.scheme.close()
    assert "a link was closed while a version was loaded: POST" in caplog.text
    assert "still runs, it may hold parts of two versions, and stays paused." in caplog.text


@pytest.mark.parametrize("answers", [True, False])
def test_close_while_an_engine_is_being_paused_resumes_it(
    world: World, answers: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """For example, a pause waits for long requests when the trainer is interrupted."""
    world.start()
    resume = "resume" if world.update == "update_weights" else "continue_generation"
    world.server.plan[world.pause] = ["stall after"]
    world.server.plan[resume] = ["serve" if answers else 500]
    world.sender.send_async()
    assert world.server.stalled.wait(PATIENCE)
    assert world.server.paused
    world.scheme.close()

    assert (world.server.calls, world.server.weights) == ([*world.server.calls[:-2], world.pause, resume], {})
    assert world.server.paused is not answers
    left = "has resumed" if answers else "may be paused"
    assert f"still runs, it has the weights that it had, and {left}." in caplog.text


def test_a_failed_engine_does_not_keep_another_from_applying_the_version(world: World) -> None:
    with serving() as other:
        world.start(world.make(world.server.url), world.make(other.url))
        world.server.plan[world.update] = ["die"]
        report = world.sender.send(on_failure="report", timeout=PATIENCE)
        assert [outcome.kind for outcome in report.outcomes.values()] == [OutcomeKind.LOST, OutcomeKind.APPLIED]
        assert equal(other, world.source)
        world.scheme.close()


class ExtraStateModule(nn.Linear):
    """A module with extra state."""

    def get_extra_state(self) -> int:
        return 3


def test_an_engine_that_is_added_again_takes_the_next_version_even_during_an_update(world: World) -> None:
    engine = world.make(world.server.url)
    world.start(engine)
    assert world.outcome().kind is OutcomeKind.APPLIED
    world.sender.add_worker(0, engine)
    assert world.outcome().kind is OutcomeKind.APPLIED

    world.server.plan[world.update] = ["stall"]
    world.sender.send_async()
    assert world.server.stalled.wait(PATIENCE)
    world.sender.add_worker(0, engine)
    assert world.server.hung_up.wait(PATIENCE)
    assert world.sender.wait_async(timeout=PATIENCE, on_failure="report")[0].kind is OutcomeKind.LOST
    nn.init.normal_(world.source[0].weight)
    assert world.outcome().kind is OutcomeKind.APPLIED
    assert (equal(world.server, world.source), world.server.paused) == (True, False)


def test_only_the_newest_link_to_an_engine_can_send_to_it(world: World) -> None:
    engine = world.make(world.server.url)
    world.start(engine)
    with scheme_with(engine, world.source) as newer:
        assert newer.get_sender().send(timeout=PATIENCE).ok
        outcome = world.outcome()
        assert (outcome.kind, "was given another link" in outcome.reason) == (OutcomeKind.LOST, True)
        assert newer.get_sender().send(timeout=PATIENCE).ok
    world.sender.add_worker(0, engine)
    assert world.outcome().kind is OutcomeKind.APPLIED


def test_extra_state_is_refused_since_no_engine_takes_it(world: World) -> None:
    world.start(source=ExtraStateModule(1, 1))
    outcome = world.outcome()
    assert outcome.kind is OutcomeKind.REFUSED
    assert "extra state of ['']" in outcome.reason
    assert world.server.calls == []


# ------------------------------------------------------------------------------------------------------- vLLM


@pytest.fixture
def server() -> Iterator[EngineServer]:
    with serving() as made:
        yield made


def test_vllm_is_initialised_once_and_gets_all_phases_of_each_version(server: EngineServer) -> None:
    with scheme_with(VLLMEngine(server.url, Inline()), small(1.0)) as scheme:
        scheme.get_sender().send(timeout=PATIENCE)
        scheme.get_sender().send(timeout=PATIENCE)
    phases = ["start_weight_update", "update_weights", "finish_weight_update"]
    each = ["pause?mode=keep", *phases, "reset_prefix_cache", "resume"]
    assert server.calls == ["init_weight_transfer_engine", *each, *each]
    assert server.bodies["init_weight_transfer_engine"] == [{"init_info": {"backend": "inline"}}]
    assert server.bodies["start_weight_update"] == [{"is_checkpoint_format": True}] * 2


@pytest.mark.parametrize(("pause", "resets"), [("keep", 1), (None, 1), ("abort", 0), ("wait", 0)])
def test_vllms_prefix_cache_is_reset_unless_its_pause_mode_did_so(
    pause: str | None, resets: int, server: EngineServer
) -> None:
    with scheme_with(VLLMEngine(server.url, Inline(), pause=pause), small(1.0)) as scheme:
        scheme.get_sender().send(timeout=PATIENCE)
    assert server.calls.count("reset_prefix_cache") == resets


@pytest.mark.parametrize("pause", ["keep", None])
def test_requests_that_keep_vllm_from_resetting_its_prefix_cache_are_logged(
    pause: str | None, server: EngineServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.plan["reset_prefix_cache"] = ["unsuccessful"]
    with scheme_with(VLLMEngine(server.url, Inline(), pause=pause), small(1.0)) as scheme:
        assert scheme.get_sender().send(timeout=PATIENCE).ok
    assert f"the vLLM server at {server.url} has requests that hold parts of its prefix cache" in caplog.text
    assert not server.paused


def test_a_carrier_transfers_the_tensors_while_the_call_is_answered(server: EngineServer) -> None:
    carrier, source = Beside(server), large(1.0)
    with scheme_with(VLLMEngine(server.url, carrier, bucket_bytes=100_000), source) as scheme:
        scheme.get_sender().send(timeout=PATIENCE)
    assert equal(server, source)
    assert carrier.joined == 1


def test_a_carrier_that_fails_ends_the_call_that_waits_for_it(server: EngineServer) -> None:
    carrier = Beside(server)

    def fail() -> None:
        raise RuntimeError("NCCL is gone")

    carrier.fails = fail
    server.plan["update_weights"] = ["stall"]
    with scheme_with(VLLMEngine(server.url, carrier), small(1.0)) as scheme:
        report = scheme.get_sender().send(on_failure="report", timeout=PATIENCE)
    assert report[0].kind is OutcomeKind.LOST
    assert "Its carrier failed in update_weights: RuntimeError('NCCL is gone')" in report[0].reason


def test_a_carrier_is_told_to_give_up_when_its_engine_fails(server: EngineServer) -> None:
    carrier = Beside(server)
    server.plan["update_weights"] = [500]
    with scheme_with(VLLMEngine(server.url, carrier), small(1.0)) as scheme:
        assert scheme.get_sender().send(on_failure="report", timeout=PATIENCE)[0].kind is OutcomeKind.LOST
        assert carrier.given_up.is_set()


def test_a_carrier_is_told_to_give_up_when_its_call_cannot_be_made() -> None:
    """The carrier's thread must end, too, since it would keep a bucket of tensors alive."""
    given_up, ended = threading.Event(), threading.Event()

    def carry() -> None:
        given_up.wait(PATIENCE)
        ended.set()

    def call() -> None:
        json.dumps({"chunk": object()})

    with pytest.raises(TypeError, match="JSON"):
        call_while_carrying(call, carry, given_up.set, lambda: None, "update_weights")
    assert given_up.is_set()
    assert ended.is_set()


class Handle:
    """A fake engine in this process, with vLLM's methods."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.names: list[str] = []

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        self.calls.append(f"init {request['init_info']}")

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, request: dict[str, Any]) -> None:
        self.names += request["update_info"]["names"]

    def finish_weight_update(self) -> None:
        if self.calls.count("start") == 2:
            raise MemoryError("no room")


def test_a_vllm_engine_can_be_driven_through_an_in_process_handle() -> None:
    handle, source = Handle(), small(1.0)
    engine = VLLMEngine(handle, Inline())
    with scheme_with(engine, source) as scheme:
        outcome = scheme.get_sender().send(timeout=PATIENCE)[0]
        assert (outcome.kind, outcome.evidence) == (OutcomeKind.APPLIED, Evidence.CALL)
        assert engine.awaited == ""  # as a later report of this engine says
        outcome = scheme.get_sender().send(on_failure="report", timeout=PATIENCE)[0]
        assert outcome.kind is OutcomeKind.LOST
        assert "finish_weight_update() of the vLLM engine Handle raised MemoryError: no room" in outcome.reason
    assert handle.calls == ["init {'backend': 'inline'}", "start", "start"]
    assert set(handle.names) == set(source.state_dict())


def test_an_in_process_handle_gets_no_call_after_its_link_was_closed_until_there_is_another() -> None:
    handle = Handle()
    engine = VLLMEngine(handle, Inline())
    engine.open()
    engine.abort()
    with pytest.raises(PartlyLoadedError, match=r"init_weight_transfer_engine.* the link was closed"):
        engine.load(iter([[("weight", torch.ones(2))]]), "1.1")
    assert handle.calls == []

    engine.open()
    engine.load(iter([[("weight", torch.ones(2))]]), "1.2")
    assert handle.names == ["weight"]


class FailsToFree(Inline):
    """A carrier that fails to free its tensors."""

    def done(self) -> None:
        raise RuntimeError("the device is gone")


def test_a_carrier_that_cannot_free_its_tensors_changes_no_outcome(caplog: pytest.LogCaptureFixture) -> None:
    """An error of `done` must not change the outcome: one version is served by the engine, one partly loaded."""
    with scheme_with(VLLMEngine(Handle(), FailsToFree()), small(1.0)) as scheme:
        kinds = [scheme.get_sender().send(on_failure="report", timeout=PATIENCE)[0].kind for _ in range(2)]
    assert kinds == [OutcomeKind.APPLIED, OutcomeKind.LOST]
    assert caplog.text.count("RuntimeError: the device is gone") == 2


def test_the_prefix_cache_of_a_vllm_handle_is_reset_if_it_has_that_method() -> None:
    handle = Handle()
    vars(handle)["reset_prefix_cache"] = lambda: handle.calls.append("reset")
    with scheme_with(VLLMEngine(handle, Inline()), small(1.0)) as scheme:
        scheme.get_sender().send(timeout=PATIENCE)
    assert handle.calls[1:] == ["start", "reset"]


@pytest.mark.parametrize(("answer", "kind"), [(False, OutcomeKind.LOST), (True, OutcomeKind.APPLIED)])
def test_a_vllm_handle_whose_prefix_cache_reset_fails_has_not_applied_the_version(
    answer: bool, kind: OutcomeKind
) -> None:
    handle = Handle()
    vars(handle)["reset_prefix_cache"] = lambda: answer
    with scheme_with(VLLMEngine(handle, Inline()), small(1.0)) as scheme:
        outcome = scheme.get_sender().send(on_failure="report", timeout=PATIENCE)[0]
    assert outcome.kind is kind
    if kind is OutcomeKind.LOST:
        assert outcome.reason.startswith(
            "the vLLM engine Handle has loaded the version, and was not paused: reset_prefix_cache() of the vLLM "
            "engine Handle returned False: requests hold parts of the prefix cache"
        )
        assert "Let its requests end before a version is sent. Start it again before you call" in outcome.reason


class AsyncHandle(Handle):
    """A fake engine with coroutine methods, like an `AsyncLLM`."""

    async def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        self.calls.append("init")

    async def finish_weight_update(self) -> None:
        self.calls.append("finish")


class AsyncCarrier(Inline):
    async def send(self, bucket: Any) -> None:
        """Never awaited."""


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: VLLMEngine(AsyncHandle(), Inline()),
            r"init_weight_transfer_engine\(\), finish_weight_update\(\) of AsyncHandle is async.* URL .* Ray actor",
        ),
        (lambda: VLLMEngine(Handle(), AsyncCarrier()), r"send\(\) of AsyncCarrier is async"),
        (lambda: SGLangEngine("http://localhost:1", AsyncCarrier()), r"send\(\) of AsyncCarrier is async"),
    ],
)
def test_an_asynchronous_engine_or_carrier_is_refused_at_construction(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        make()


async def never() -> None:
    raise AssertionError


@pytest.mark.parametrize(
    ("phase", "kind"),
    [
        ("init_weight_transfer_engine", OutcomeKind.REFUSED),
        ("update_weights", OutcomeKind.LOST),
        ("finish_weight_update", OutcomeKind.LOST),
    ],
)
def test_a_handle_call_that_returned_an_awaitable_is_never_acked(phase: str, kind: OutcomeKind) -> None:
    handle = Handle()
    vars(handle)[phase] = lambda *_: never()
    with scheme_with(VLLMEngine(handle, Inline()), small(1.0)) as scheme:
        outcome = scheme.get_sender().send(on_failure="report", timeout=PATIENCE)[0]
    assert outcome.kind is kind
    assert f"{phase}() of the vLLM engine Handle returned a coroutine" in outcome.reason


class CustomEngine(Engine):
    """A user's adapter."""

    bucket_bytes, name_map = 1 << 20, None

    def open(self) -> None:
        """Do nothing."""

    def load(self, buckets: Any, version: str) -> Any:
        return never()

    def abort(self) -> None:
        """Do nothing."""

    def __str__(self) -> str:
        return "an engine of my own"


class Minimal(Engine):
    """An adapter with the methods that docs/engines.md requires, and nothing else."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def open(self) -> None:
        """Do nothing."""

    def load(self, buckets: Any, version: str) -> None:
        self.loaded += [name for bucket in buckets for name, _ in bucket]

    def abort(self) -> None:
        """Do nothing."""

    def __str__(self) -> str:
        return "a minimal engine"


def test_an_adapter_with_only_the_four_required_methods_is_loaded() -> None:
    engine = Minimal()
    with scheme_with(engine, small(1.0)) as scheme:
        assert scheme.get_sender().send(timeout=PATIENCE).ok
    assert set(engine.loaded) == small(1.0).state_dict().keys()


class Unstoppable(Minimal):
    """An adapter whose first `load` ends only when the test sets ``let_go``."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def load(self, buckets: Any, version: str) -> None:
        first, number = not self.loaded, version.partition(".")[2]
        self.loaded.append(number)
        if first:
            self.let_go.wait(PATIENCE)
        super().load(buckets, version)


def test_a_version_queued_behind_an_unstoppable_call_is_not_loaded_after_a_newer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "PATIENCE", 0.1)
    engine = Unstoppable()
    with scheme_with(engine, small(1.0)) as scheme:
        sender = scheme.get_sender()
        for _ in range(2):
            with pytest.raises(AckTimeoutError):
                sender.send(timeout=0.1, on_pending="supersede")
        thread = sender._driver.by_worker()[0]._call_client._thread._thread
        sender.abandon()
        sender.add_worker(0, engine)
        assert sender.send(timeout=PATIENCE).ok
        engine.let_go.set()
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert [name for name in engine.loaded if name.isdigit()] == ["1", "2", "3"]


class StuckInABucket(Minimal):
    """An adapter that writes tensors as they arrive. Its first `load` hangs, in spite of `abort`, until ``let_go``."""

    bucket_bytes = 1

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, torch.Tensor] = {}
        self.entered, self.let_go = threading.Event(), threading.Event()

    def load(self, buckets: Any, version: str) -> None:
        for bucket in buckets:
            self.held.update((name, tensor.clone()) for name, tensor in bucket)
            if not self.entered.is_set():
                self.entered.set()
                self.let_go.wait(PATIENCE)


@pytest.mark.parametrize("newer", ["open", "closed"])
def test_an_unstoppable_call_loads_no_more_of_its_version_once_a_newer_link_was_made(
    newer: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The rest of its tensors must not overwrite those of the newer version, which has been acked."""
    monkeypatch.setattr(client, "PATIENCE", 0.1)
    engine, source = StuckInABucket(), small(1.0)
    with scheme_with(engine, source) as scheme:
        sender = scheme.get_sender()
        sender.send_async()
        assert engine.entered.wait(PATIENCE)
        thread = sender._driver.by_worker()[0]._call_client._thread._thread
        sender.abandon()
        sender.add_worker(0, engine)
        assert sender.send(small(2.0), timeout=PATIENCE).ok
        if newer == "closed":
            sender.close()
        engine.let_go.set()
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert {value for tensor in engine.held.values() for value in tensor.flatten().tolist()} == {2.0}
    assert "a link was closed while a version was loaded" in caplog.text


def test_an_unstoppable_call_loads_its_whole_version_if_no_newer_link_has_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "PATIENCE", 0.1)
    engine = StuckInABucket()
    with scheme_with(engine, small(1.0)) as scheme:
        scheme.get_sender().send_async()
        assert engine.entered.wait(PATIENCE)
        thread = scheme.get_sender()._driver.by_worker()[0]._call_client._thread._thread
    engine.let_go.set()
    thread.join(PATIENCE)
    assert engine.held.keys() == small(1.0).state_dict().keys()


class AsyncCustomEngine(CustomEngine):
    async def load(self, buckets: Any, version: str) -> None:
        """Never awaited."""


def test_a_custom_async_adapter_is_refused_and_a_returned_awaitable_is_never_acked() -> None:
    with pytest.raises(ConfigurationError, match=r"load\(\) of AsyncCustomEngine is async"):
        scheme_with(AsyncCustomEngine(), small(1.0))
    with scheme_with(CustomEngine(), small(1.0)) as scheme:
        outcome = scheme.get_sender().send(on_failure="report", timeout=PATIENCE)[0]
    assert outcome.kind is OutcomeKind.LOST
    assert "load() returned an awaitable" in outcome.reason


def test_a_carrier_whose_send_returned_an_awaitable_has_failed(server: EngineServer) -> None:
    carrier = Beside(server)
    vars(carrier)["send"] = lambda _: never()
    with scheme_with(VLLMEngine(Handle(), carrier), small(1.0)) as scheme:
        outcome = scheme.get_sender().send(on_failure="report", timeout=PATIENCE)[0]
    assert outcome.kind is OutcomeKind.LOST
    assert "Its carrier failed in update_weights" in outcome.reason


# ----------------------------------------------------------------------------------------------------- SGLang


@pytest.mark.parametrize("pause", ["retract", "abort", "in_place", None])
def test_sglangs_prefix_cache_is_flushed_in_every_pause_mode(pause: str | None, server: EngineServer) -> None:
    with scheme_with(SGLangEngine(server.url, pause=pause), small(1.0)) as scheme:
        scheme.get_sender().send(timeout=PATIENCE)
    paused, resumed = (["pause_generation"], ["continue_generation"]) if pause else ([], [])
    assert server.calls == [*paused, "update_weights_from_tensor", "flush_cache", *resumed]
    assert server.bodies["pause_generation"] == [{"mode": pause}] * len(paused)


@pytest.mark.parametrize(
    ("pause", "status", "kind"),
    [
        ("retract", 400, OutcomeKind.APPLIED),
        (None, 400, OutcomeKind.APPLIED),
        ("retract", 500, OutcomeKind.LOST),
        ("abort", 400, OutcomeKind.LOST),
    ],
)
def test_requests_that_keep_sglang_from_flushing_its_cache_are_logged_unless_aborted(
    pause: str | None, status: int, kind: OutcomeKind, server: EngineServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.plan["flush_cache"] = [status]
    with scheme_with(SGLangEngine(server.url, pause=pause), small(1.0)) as scheme:
        assert scheme.get_sender().send(on_failure="report", timeout=PATIENCE)[0].kind is kind
    assert ("it did not flush its prefix cache" in caplog.text) is (kind is OutcomeKind.APPLIED)
    assert not (server.paused and kind is OutcomeKind.APPLIED)


def test_the_buckets_of_all_sglang_ranks_together_have_a_bounded_size(server: EngineServer) -> None:
    source = large(1.0)
    with scheme_with(SGLangEngine(server.url, tp_size=4, bucket_bytes=400_000), source) as scheme:
        scheme.get_sender().send(timeout=PATIENCE)
    assert equal(server, source)
    assert {len(body["serialized_named_tensors"]) for body in server.bodies["update_weights_from_tensor"]} == {4}
    assert max(server.sizes) <= 100_000


def test_sglang_keeps_its_cache_if_asked_to(server: EngineServer) -> None:
    with scheme_with(SGLangEngine(server.url, flush_cache=False), small(1.0)) as scheme:
        scheme.get_sender().send(timeout=PATIENCE)
    assert "flush_cache" not in server.calls


@pytest.mark.parametrize(("kind", "turns_away"), [("vllm", "start_weight_update"), ("sglang", KINDS["sglang"][1])])
def test_an_engine_that_rejects_a_version_and_does_not_resume_is_lost(
    kind: str, turns_away: str, server: EngineServer
) -> None:
    make, resume = KINDS[kind][0], {"vllm": "resume", "sglang": "continue_generation"}[kind]
    server.plan[turns_away], server.plan[resume] = [404], [500]
    with scheme_with(make(server.url), small(1.0)) as scheme:
        outcome = scheme.get_sender().send(on_failure="report", timeout=PATIENCE)[0]

    assert outcome.kind is OutcomeKind.LOST
    assert "did not load the version, and may be paused: it did not confirm that it resumed. POST" in outcome.reason
    assert (server.paused, server.weights) == (True, {})


@pytest.mark.parametrize(("kind", "fails"), [("vllm", "finish_weight_update"), ("sglang", KINDS["sglang"][1])])
def test_a_failed_engine_that_was_not_paused_is_reported_as_not_paused(
    kind: str, fails: str, server: EngineServer
) -> None:
    server.plan[fails] = [500]
    with scheme_with(KINDS[kind][0](server.url, pause=None), small(1.0)) as scheme:
        outcome = scheme.get_sender().send(on_failure="report", timeout=PATIENCE)[0]

    assert outcome.kind is OutcomeKind.LOST
    assert "may hold parts of two versions, and was not paused: POST" in outcome.reason


def test_an_engine_with_pause_none_is_neither_paused_nor_resumed(server: EngineServer) -> None:
    for engine in (SGLangEngine(server.url, pause=None), VLLMEngine(server.url, Inline(), pause=None)):
        with scheme_with(engine, small(1.0)) as scheme:
            scheme.get_sender().send(timeout=PATIENCE)
    assert not [call for call in server.calls if "pause" in call or "resume" in call or "continue" in call]


def test_a_carrier_transfers_the_tensors_to_sglang(server: EngineServer) -> None:
    carrier, source = Beside(server), large(1.0)
    with scheme_with(SGLangEngine(server.url, carrier, bucket_bytes=100_000), source) as scheme:
        scheme.get_sender().send(timeout=PATIENCE)
        assert equal(server, source)
        server.plan["update_weights_from_distributed"] = [500]
        assert scheme.get_sender().send(on_failure="report", timeout=PATIENCE)[0].kind is OutcomeKind.LOST
    assert (server.calls[0], carrier.joined, carrier.given_up.is_set()) == ("init_weights_update_group", 1, True)
    assert "update_weights_from_tensor" not in server.calls


# --------------------------------------------------------------------------------------------- a language model


@pytest.mark.parametrize(
    ("make", "joins"),
    [
        (lambda server: VLLMEngine(server.url, Inline()), "init_weight_transfer_engine"),
        (lambda server: SGLangEngine(server.url, Beside(server)), "init_weights_update_group"),
    ],
    ids=["vllm", "sglang"],
)
def test_an_engine_that_could_not_join_the_carriers_group_joins_before_the_next_version(
    make: Callable[[EngineServer], Engine], joins: str, server: EngineServer
) -> None:
    server.plan[joins] = [500]
    with scheme_with(make(server), small(1.0)) as scheme:
        sender = scheme.get_sender()
        kinds = [sender.send(on_failure="report", timeout=PATIENCE)[0].kind for _ in range(3)]
    assert kinds == [OutcomeKind.REFUSED, OutcomeKind.APPLIED, OutcomeKind.APPLIED]
    assert server.calls.count(joins) == 2


def test_a_language_model_arrives_whole_in_bfloat16(server: EngineServer) -> None:
    require_modules("transformers", what="A LANGUAGE MODEL", extra="dev")
    import transformers  # noqa: PLC0415 - its import takes seconds

    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    with scheme_with(SGLangEngine(server.url, bucket_bytes=4096), model, wire_dtype="bfloat16") as scheme:
        assert scheme.get_sender().send(timeout=PATIENCE).ok
    other = transformers.GPT2LMHeadModel(config).bfloat16().eval()
    other.load_state_dict(server.weights)
    tokens = torch.arange(8)[None]
    assert torch.equal(other(tokens).logits, model.bfloat16()(tokens).logits)


def test_of_a_long_answer_only_the_beginning_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_MAX_ANSWER_NBYTES", 8)
    long: Any = SimpleNamespace(read=bytes, length=12)
    broken: Any = SimpleNamespace(read=lambda _: b"half", length=4)
    assert http._read(long) == bytes(8)
    with pytest.raises(IncompleteRead):
        http._read(broken)


@pytest.mark.parametrize("answer", [None, {}, {"success": "perhaps"}])
def test_an_update_that_sglang_does_not_confirm_has_failed(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    engine = SGLangEngine("http://localhost:1", pause=None, flush_cache=False)
    monkeypatch.setattr(engine._calls, "command", lambda *_: answer)
    with pytest.raises(PartlyLoadedError, match=r"update_weights_from_tensor was answered"):
        engine.load(iter([[("weight", torch.ones(2))]]), "1.1")


# -------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: VLLMEngine("localhost:8000", Inline()), "is not the URL of an engine"),
        (lambda: VLLMEngine("http://localhost:99999", Inline()), "is not the URL of an engine"),
        (lambda: SGLangEngine("http://localhost:port"), "is not the URL of an engine"),
        (lambda: SGLangEngine(None), "None is not the URL of an engine"),
        (lambda: SGLangEngine(8000), "8000 is not the URL of an engine"),
        (
            lambda: SGLangEngine("http://me:secret@localhost:1"),
            r"^the URL of an engine has a user or a password, which",
        ),
        (lambda: SGLangEngine("http://localhost:1", name_map=["a"]), "give a mapping"),
        (lambda: VLLMEngine("http://localhost:1", Inline(), name_map={"a": 3}), "give a mapping"),
        (lambda: VLLMEngine("http://localhost:1", 3), "is not a Carrier"),
        (lambda: VLLMEngine(object(), Inline()), "has no init_weight_transfer_engine"),
        (lambda: VLLMEngine("http://localhost:1", Inline(), pause="doze"), "doze"),
        (lambda: SGLangEngine("http://localhost:1", headers=[("a", "b")]), "headers= is of type list: give a dict"),
        (lambda: SGLangEngine("http://localhost:1", tp_size=0), "tp_size= is 0"),
        (lambda: SGLangEngine("http://localhost:1", tp_size="2"), "tp_size= is '2'"),
        (lambda: EngineWeightSyncScheme().init_on_sender("policy", model=small(1.0)), "needs engines="),
        (
            lambda: EngineWeightSyncScheme().init_on_sender(
                "policy", engines=[VLLMEngine(Handle(), Inline())] * 2, model=small(1.0)
            ),
            "workers 0 and 1 are the same VLLMEngine: name each worker once",
        ),
        (lambda: EngineWeightSyncScheme().init_on_worker("policy", model=small(1.0)), "no worker's side"),
    ],
)
def test_unusable_arguments_are_refused(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        make()


@pytest.mark.parametrize("value", ["Bearer s3cret\n", "Bearer s3cret\r\nHost: b", "s3cret \u20ac", b"s3cret", None])
@pytest.mark.parametrize("make", [SGLangEngine, lambda url, **options: VLLMEngine(url, Inline(), **options)])
def test_the_error_for_an_unsendable_header_does_not_show_its_value(make: Callable[..., Any], value: Any) -> None:
    with pytest.raises(ConfigurationError, match="headers= has 'Authorization', whose value") as caught:
        make("http://localhost:1", headers={"Authorization": value})
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("url", ["http://a:s3cret@b:1", "http://b:1/engine?key=s3cret", "http://b:1/#s3cret"])
@pytest.mark.parametrize("make", [SGLangEngine, lambda url: VLLMEngine(url, Inline())])
def test_the_error_for_a_url_with_a_user_a_query_or_a_fragment_does_not_show_them(
    make: Callable[..., Any], url: str
) -> None:
    with pytest.raises(ConfigurationError, match="which is sent nowhere: pass") as caught:
        make(url)
    assert "s3cret" not in str(caught.value)


def test_invalid_header_names_are_refused() -> None:
    for name in ("a b", "a:", "", 3):
        with pytest.raises(ConfigurationError, match="is not the name of an HTTP header"):
            SGLangEngine("http://localhost:1", headers={name: "1"})  # type: ignore[dict-item]
    SGLangEngine("http://localhost:1", headers={"X-Api_Key": "caf\u00e9\t=="})


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, "256", True, None])
@pytest.mark.parametrize(
    "make",
    [
        lambda nbytes: VLLMEngine("http://localhost:1", Inline(), bucket_bytes=nbytes),
        lambda nbytes: VLLMEngine(Handle(), Inline(), bucket_bytes=nbytes),
        lambda nbytes: SGLangEngine("http://localhost:1", bucket_bytes=nbytes),
    ],
)
def test_a_bucket_size_that_is_not_a_positive_int_is_refused(make: Callable[[Any], Any], nbytes: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"^bucket_bytes= is {nbytes!r}: give a number of bytes as an int, 1 or more\.$"
    ):
        make(nbytes)


def test_buckets_are_filled_to_the_limit_and_a_larger_tensor_gets_its_own() -> None:
    weights = [(str(size), torch.zeros(size, dtype=torch.uint8)) for size in (3, 3, 4, 20, 1)]
    found = [[name for name, _ in bucket] for bucket in group_into_buckets(iter(weights), 6)]
    assert found == [["3", "3"], ["4"], ["20"], ["1"]]
