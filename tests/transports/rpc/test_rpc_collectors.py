"""Collectors without a weightsync receiver: their method is called, and its return is the only evidence."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fleet import PATIENCE, WorkerSetup, constants, receive, small
from msgspec.structs import replace
from rpc_fleet import World, attempt, command, listen, odd, retire, send, shows
from tensordict import TensorDict
from torch.distributed import rpc

from weightsync import Evidence, OutcomeKind, RefusedError, RPCWeightSyncScheme, WorkerLostError
from weightsync.protocol.messages import Update
from weightsync.schemes.peers import collectors


class Collector:
    """A user's collector, without any weightsync code."""

    def __init__(self) -> None:
        self.model = small()
        self.kind = ""

    def update_policy_weights_(self, policy_or_weights: Any) -> None:
        self.kind = type(policy_or_weights).__name__
        weights = policy_or_weights
        if isinstance(weights, TensorDict):
            weights = weights.flatten_keys(".").to_dict()
        self.model.load_state_dict(weights)

    def shown(self) -> tuple[str, set[float]]:
        return self.kind, constants(self.model)


class Reference(Collector):
    """A collector whose static method gets the RRef, as in generation A."""

    @staticmethod
    def update_policy_weights_(rref: Any, weights: Any) -> None:  # type: ignore[override]
        rref.local_value().model.load_state_dict(weights)


class Raising(Collector):
    """A collector whose method raises."""

    def update_policy_weights_(self, policy_or_weights: Any) -> None:
        raise ValueError("the collector does not want them")


class TorchRLStyleCollector(Collector):
    """A collector with the method of TorchRL's collectors, which takes TensorDicts."""

    def update_policy_weights_(self, policy_or_weights: Any = None, *, worker_ids: Any = None, **_: Any) -> None:
        self.kind = type(policy_or_weights).__name__
        TensorDict.from_module(self.model).data.update_(policy_or_weights.data)


class Keeping(Collector):
    """A collector that keeps the argument of its method."""

    def update_policy_weights_(self, policy_or_weights: Any) -> None:
        self.kept = policy_or_weights

    def given(self) -> Any:
        return self.kept


def command_collectors(
    setup: WorkerSetup,
    kind: Any,
    names: list[str],
    strategy: str = "state_dict",
    named: tuple[str, ...] = ("infos", "class"),
) -> None:
    rrefs = setup.kept["rrefs"] = [rpc.remote(name, kind) for name in names]
    given: dict[str, Any] = {"collector_rrefs": rrefs}
    if "infos" in named:
        given["collector_infos"] = [rpc.get_worker_info(name) for name in names]
    if "class" in named:
        given["collector_class"] = kind
    setup.scheme, setup.model = RPCWeightSyncScheme(strategy), small(1.0)
    setup.scheme.init_on_sender("policy", model=setup.model, **given)
    setup.kept["sender"] = setup.scheme.get_sender()


def shown(setup: WorkerSetup, index: int = 0) -> Any:
    return setup.kept["rrefs"][index].rpc_sync(timeout=PATIENCE).shown()


@pytest.fixture
def trainer(world: World) -> Any:
    yield world.trainer
    world.trainer.do(retire)


@pytest.mark.parametrize("named", [("infos", "class"), ("class",), ()], ids=["all", "no_infos", "rrefs_only"])
def test_a_collectors_method_takes_the_weights(trainer: Any, named: tuple[str, ...]) -> None:
    trainer.do(command_collectors, Collector, ["w0", "w1"], "state_dict", named)
    report = trainer.do(send, 3.0)

    assert report.ok
    assert {outcome.evidence for outcome in report.outcomes.values()} == {Evidence.CALL}
    assert [trainer.do(shown, index) for index in (0, 1)] == [("dict", {3.0})] * 2
    assert trainer.do(send, 4.0).version == 2
    assert trainer.do(shown, 1) == ("dict", {4.0})


def test_a_collector_gets_the_format_of_the_strategy(trainer: Any) -> None:
    trainer.do(command_collectors, Collector, ["w0"], "tensordict")
    assert trainer.do(send, 3.0).ok

    assert trainer.do(shown) == ("TensorDict", {3.0})


@pytest.mark.parametrize("named", [("infos", "class"), ()], ids=["class", "reference_alone"])
def test_a_method_with_torchrls_signature_is_given_a_tensordict(trainer: Any, named: tuple[str, ...]) -> None:
    trainer.do(command_collectors, TorchRLStyleCollector, ["w0"], "state_dict", named)
    for fill in (3.0, 4.0):
        assert trainer.do(send, fill).ok
        assert trainer.do(shown) == ("TensorDict", {fill})


def over_the_documented_transport(setup: WorkerSetup, kind: Any, name: str, fill: float, registered: bool) -> Any:
    """Send to ``(collector_info, collector_rref, collector_class)``, by a transport or a sender with this endpoint."""
    scheme, rref = RPCWeightSyncScheme(), rpc.remote(name, kind)
    setup.kept["rrefs"], three = [rref], (rpc.get_worker_info(name), rref, kind)
    if registered:
        with scheme.create_sender() as sender:
            sender._register_worker(0, three)
            return sender.send(small(fill), timeout=PATIENCE)
    with scheme.create_transport(three) as transport:
        return transport.send_weights("policy", small(fill), timeout=PATIENCE)


@pytest.mark.parametrize("registered", [True, False])
def test_info_rref_and_class_address_a_collector(trainer: Any, registered: bool) -> None:
    report = trainer.do(over_the_documented_transport, Collector, "w0", 6.0, registered)

    assert report.ok
    assert trainer.do(shown) == ("dict", {6.0})


def test_a_static_method_that_takes_the_rref_is_given_it(trainer: Any) -> None:
    trainer.do(command_collectors, Reference, ["w0"])
    assert trainer.do(send, 5.0).ok

    assert trainer.do(shown)[1] == {5.0}


def test_a_collector_that_raises_refuses_with_its_traceback(trainer: Any) -> None:
    trainer.do(command_collectors, Raising, ["w0"])
    error = trainer.do(attempt, send, 5.0)

    assert isinstance(error, RefusedError)
    outcome = error.report.outcomes[0]
    assert outcome.kind is OutcomeKind.REFUSED
    assert outcome.evidence is Evidence.CALL
    assert outcome.reason == "ValueError: the collector does not want them"
    assert "update_policy_weights_" in outcome.remote_traceback


def local_class() -> Any:
    """A collector of a class that no other process can import."""

    class Here(Collector):
        pass

    return Here()


def no_collector() -> Any:
    raise ValueError("there is no collector here")


@pytest.mark.parametrize(
    ("make", "why"),
    [(local_class, "(Attribute|Pickling)Error: .*Here"), (no_collector, "ValueError: there is no collector here")],
)
def test_a_collector_whose_class_cannot_be_determined_is_lost_with_that_reason(
    trainer: Any, make: Any, why: str
) -> None:
    trainer.do(command_collectors, make, ["w0"], "state_dict", ())

    for _ in range(2):
        error = trainer.do(attempt, send, 2.0)
        assert isinstance(error, WorkerLostError)
        reason = error.report[0].reason
        assert re.search(f"class of the collector of collector_rref cannot be determined: {why}", reason)
        assert "frame #" not in reason
        assert "\n" not in reason


def test_weights_of_every_dtype_reach_a_collector(trainer: Any) -> None:
    trainer.do(command_collectors, Keeping, ["w0"])
    assert trainer.do(send_odd_to_collector).ok
    expected, found = odd(1.0).state_dict(), trainer.do(given)

    assert set(expected) == set(found)
    assert all(tensor.dtype == found[name].dtype for name, tensor in expected.items())
    assert all(tensor.shape == found[name].shape for name, tensor in expected.items())
    assert torch.equal(expected["strided"], found["strided"])


def send_odd_to_collector(setup: WorkerSetup) -> Any:
    setup.scheme.model = odd(1.0)
    return setup.kept["sender"].send(timeout=PATIENCE)


def given(setup: WorkerSetup) -> Any:
    found = setup.kept["rrefs"][0].rpc_sync(timeout=PATIENCE).given()
    return {name: tensor.clone() for name, tensor in found.items()}


def test_a_collector_in_a_process_with_a_receiver_is_updated_by_the_receiver(world: World, trainer: Any) -> None:
    world.workers[0].do(listen)
    trainer.do(command_collectors, Raising, ["w0"])
    trainer.tell(send, 6.0)
    assert world.workers[0].do(receive)
    report = trainer.answer()

    assert report.outcomes[0].evidence is Evidence.ANSWER
    assert world.workers[0].do(shows) == (1, {6.0})
    world.workers[0].do(retire)


def test_a_process_without_weightsync_is_a_plain_collector(world: World, trainer: Any) -> None:
    world.workers[2].do(hide, "weightsync.transports.rpc")
    try:
        trainer.do(command_collectors, Collector, ["w2"])
        assert trainer.do(send, 7.0).outcomes[0].evidence is Evidence.CALL
        assert trainer.do(shown)[1] == {7.0}
        trainer.do(retire)
        trainer.do(command, ["w2"])
        assert "is weightsync installed" in trainer.do(attempt, send, 8.0).lost[0]
    finally:
        world.workers[2].do(unhide, "weightsync.transports.rpc")


def hide(setup: WorkerSetup, module: str) -> None:
    setup.kept["hidden"] = sys.modules[module]
    sys.modules[module] = None  # type: ignore[assignment]


def unhide(setup: WorkerSetup, module: str) -> None:
    sys.modules[module] = setup.kept.pop("hidden")


def test_a_collector_that_is_killed_is_lost(short_lived: Callable[..., World]) -> None:
    world = short_lived(2)
    world.trainer.do(command_collectors, Collector, ["w0", "w1"])
    assert world.trainer.do(send, 1.0).ok
    world.workers[0].kill()
    error = world.trainer.do(attempt, send, 2.0)

    assert isinstance(error, WorkerLostError)
    assert list(error.lost) == [0]
    assert world.trainer.do(shown, 1)[1] == {2.0}


def test_a_collector_is_given_one_version_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """RPC runs calls in several threads, so the older version could be the last to go live."""
    begun: list[Future[Any]] = []

    def begin(*_: Any) -> Future[Any]:
        begun.append(Future())
        return begun[-1]

    monkeypatch.setattr(collectors, "begin", begin)
    presenter: Any = SimpleNamespace(present=lambda *_: SimpleNamespace(weights=None))
    call_client = collectors.CollectorCallClient(lambda _: torch.futures.Future(), "worker 0", presenter, lambda: None)
    update = Update(model_id="m", incarnation=1, version=1, layout_digest=b"", nbytes=0)
    first, second = (call_client.start(replace(update, version=version), None) for version in (1, 2))
    assert len(begun) == 1

    begun[0].set_result([])

    assert first.done()
    assert not second.done()
    assert len(begun) == 2
    begun[1].set_result([])
    assert second.done()
