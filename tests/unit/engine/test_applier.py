"""An arrived update is verified, and then applied in whole or refused with everything that its sender needs to know."""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fleet import PATIENCE, Pair, constants, filled, large, small
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from weightsync import (
    ConfigurationError,
    LayoutError,
    MultiProcessWeightSyncScheme,
    RefusedError,
    SharedMemWeightSyncScheme,
    State,
    WeightStrategy,
    WeightSyncError,
    WorkerLostError,
)
from weightsync.engine import applier
from weightsync.engine.applier import Applier
from weightsync.engine.serving_lock import ServingLock
from weightsync.protocol.messages import Refusal
from weightsync.protocol.report import Evidence, Outcome, OutcomeKind
from weightsync.transports import mapping as mappings
from weightsync.transports.mapping import Mapping
from weightsync.weights import target as targets
from weightsync.weights.target import Mode
from weightsync.weights.tree_digest import digest


class Moody(nn.Module):
    """A model that refuses the extra state 13."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.mood = 0

    def get_extra_state(self) -> int:
        return self.mood

    def set_extra_state(self, state: Any) -> None:
        if state == 13:
            raise ValueError("no thirteen here")
        self.mood = state


def moody(fill: float = 0.0) -> nn.Module:
    return filled(Moody(), fill)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(MultiProcessWeightSyncScheme, model=moody)
    yield made
    made.close()


def refused(pair: Pair) -> Outcome:
    """The sender's outcome of an update that the receiver refuses now."""
    assert pair.receiver.receive(timeout=0) is False
    with pytest.raises(RefusedError) as caught:
        pair.sender.wait_async(timeout=PATIENCE)
    outcome: Outcome = caught.value.report[0]
    answer = pair.receiver.driver.data.answer
    assert isinstance(answer, Refusal)
    assert answer.fence == pair.receiver.driver.data.fence > 0
    assert (outcome.kind, outcome.evidence, outcome.reason) == (
        OutcomeKind.REFUSED,
        Evidence.ANSWER,
        pair.receiver.last_refusal,
    )
    return outcome


def test_an_update_refused_by_a_model_hook_reports_its_message_and_traceback(pair: Pair) -> None:
    assert pair.receiver.last_refusal == ""
    assert pair.sync()[0].kind is OutcomeKind.APPLIED
    pair.source.mood = 13
    pair.sender.send_async()
    outcome = refused(pair)

    assert outcome.reason == "ValueError: no thirteen here"
    assert "in set_extra_state" in outcome.remote_traceback
    assert (pair.receiver.version, pair.receiver.state, constants(pair.model.linear)) == (1, State.READY, {1.0})
    pair.source.mood = 14
    assert pair.sync()[0].apply_s > 0
    assert (pair.receiver.version, pair.model.mood) == (3, 14)


@pytest.mark.parametrize("model", [small, large])
@pytest.mark.parametrize("scheme_class", [MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme])
def test_under_fake_tensor_mode_nothing_is_sent_and_nothing_applied(scheme_class: Any, model: Any) -> None:
    pair = Pair(scheme_class, model=model)
    no_values, message = FakeTensorMode(allow_non_fake_inputs=True), "this thread is in torch's FakeTensorMode"
    try:
        assert pair.sync().ok
        filled(pair.source, 2.0)
        with no_values, pytest.raises(ConfigurationError, match=message):
            pair.sender.send_async()
        pair.sender.send_async()
        with no_values:
            assert refused(pair).reason.startswith(message)
        assert (constants(pair.model), pair.receiver.version) == ({1.0}, 1)
        assert pair.sync().ok
        assert constants(pair.model) == {2.0}
    finally:
        pair.close()


class RaisingHandler(logging.Handler):
    """A user's log handler that fails, as those of pytest and Sentry may."""

    def emit(self, record: logging.LogRecord) -> None:
        raise OSError(f"the log is full: {record.getMessage()}")


@pytest.fixture
def log_that_raises() -> Iterator[None]:
    handler = RaisingHandler(level=logging.WARNING)
    logger = logging.getLogger("weightsync")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)


@pytest.mark.usefixtures("log_that_raises")
def test_g11_a_refusal_reaches_the_sender_although_the_log_handler_of_the_worker_raises(pair: Pair) -> None:
    pair.model.another = nn.Linear(1, 1)
    pair.sender.send_async()
    with pytest.raises(OSError, match="the log is full: model 'policy' refused version 1"):
        pair.receiver.receive(timeout=0)

    assert pair.receiver.receive(timeout=0) is False
    with pytest.raises(RefusedError, match=r"another\.weight"):
        pair.sender.wait_async(timeout=PATIENCE)


@pytest.mark.usefixtures("log_that_raises")
def test_g11_a_refused_handshake_reaches_the_sender_although_the_log_handler_of_the_worker_raises() -> None:
    ours, theirs = multiprocessing.Pipe()
    with MultiProcessWeightSyncScheme() as sending, MultiProcessWeightSyncScheme() as receiving:
        sending.init_on_sender("policy", pipes=[ours], model=moody())
        receiving.init_on_worker("policy", pipe=theirs, model=nn.Linear(3, 3))
        with pytest.raises(OSError, match="the log is full"):
            receiving.get_receiver().receive(timeout=0)

        with pytest.raises(RefusedError, match="it refused the handshake: The weights do not fit"):
            sending.get_sender().await_workers(timeout=PATIENCE)


def test_an_update_that_does_not_fit_is_refused_with_the_tensor_name_and_a_traceback(pair: Pair) -> None:
    pair.model.another = nn.Linear(1, 1)
    pair.sender.send_async()
    outcome = refused(pair)

    assert "another.weight" in outcome.reason
    assert "in swap" in outcome.remote_traceback


def test_an_update_damaged_in_transit_is_refused_with_both_digests(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applier, "digest", lambda *_: b"\1" * 16)
    pair.sender.send_async()
    outcome = refused(pair)
    assert outcome.reason.startswith(f"version 1 arrived with digest {'01' * 16}, but its sender sent ")
    assert pair.receiver.version is None

    monkeypatch.undo()
    assert pair.sync().ok


def test_a_broken_swap_closes_the_receiver_and_both_sides_get_the_reason(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scatter(*_: Any) -> None:
        raise RuntimeError("the bus is gone")

    monkeypatch.setattr(targets, "scatter", scatter)
    pair.sender.send_async()
    with pytest.raises(WeightSyncError) as caught:
        pair.receiver.receive(timeout=0)
    with pytest.raises(WorkerLostError) as lost:
        pair.sender.wait_async(timeout=PATIENCE)

    text = str(caught.value)
    assert text.startswith("the swap of version 1 of 'policy' failed halfway and could not be undone: ")
    assert "the bus is gone" in text
    assert isinstance(caught.value.__cause__, targets.SwapBroken)
    assert (pair.receiver.broken, pair.receiver.state) == (caught.value, State.CLOSED)
    assert text in lost.value.lost[0]
    assert "in swap" in lost.value.report[0].remote_traceback


def test_a_staged_version_is_applied_to_a_newly_registered_model_only(pair: Pair) -> None:
    """A version that was staged for one model is not swapped into another one."""
    pair.sender.send_async()
    with pair.receiver.serving():
        assert pair.receiver.receive(timeout=0) is False
    pair.receiver.register_model(moody(5.0))

    assert pair.receiver.receive(timeout=0) is True
    assert constants(pair.receiver.model.linear) == {1.0}
    assert constants(pair.model.linear) == {0.0}


def test_a_staged_version_that_is_superseded_never_goes_live(pair: Pair) -> None:
    pair.sender.send_async()
    with pair.receiver.serving():
        assert pair.receiver.receive(timeout=0) is False
        pair.sender.send_async(moody(2.0), on_pending="supersede")
        assert pair.receiver.receive(timeout=0) is False
    assert pair.receiver.receive(timeout=0) is True

    assert (pair.receiver.version, constants(pair.model.linear)) == (2, {2.0})
    assert pair.sender.wait_async(timeout=PATIENCE).ok


def test_receive_with_timeout_zero_does_not_wait_for_another_serving_thread(pair: Pair) -> None:
    served, over = threading.Event(), threading.Event()

    def serve() -> None:
        with pair.receiver.serving():
            served.set()
            over.wait(PATIENCE)

    pair.sender.send_async()
    with ThreadPoolExecutor(1) as beside:
        serving = beside.submit(serve)
        served.wait(PATIENCE)
        assert pair.receiver.receive(timeout=0) is False
        assert not serving.done()
        over.set()
    assert pair.receiver.receive(timeout=0) is True


def test_pending_weights_applied_by_hand_are_acked(pair: Pair) -> None:
    pair.sender.send_async()
    pair.receiver.apply_weights(pair.source.state_dict())

    assert (pair.receiver.version, constants(pair.model.linear)) == (1, {1.0})
    assert pair.sender.wait_async(timeout=PATIENCE).ok


def test_pending_weights_applied_by_hand_are_acked_after_the_worker_wrote_into_older_ones() -> None:
    """In shared memory the pending version lies in a slot of an older version, of which the parameters were views."""
    pair = Pair(SharedMemWeightSyncScheme, model=large)
    try:
        for _ in range(4):
            pair.sync()
            with torch.no_grad():
                pair.model[0].weight.add_(1.0)
        filled(pair.source, 7.0)
        pair.sender.send_async()
        pair.receiver.apply_weights(pair.source.state_dict())

        assert pair.sender.wait_async(timeout=PATIENCE).ok
        assert (pair.receiver.version, constants(pair.model)) == (5, {7.0})
    finally:
        pair.close()


@pytest.mark.parametrize("taken", [True, False])
def test_refused_pending_weights_applied_by_hand_raise_in_the_worker_and_the_sender(pair: Pair, taken: bool) -> None:
    pair.source.mood = 13
    pair.sender.send_async()
    weights = pair.receiver.take_update(PATIENCE) if taken else pair.source.state_dict()
    with pytest.raises(WeightSyncError, match=r"version 1 of 'policy'.*refused: ValueError: no thirteen here"):
        pair.receiver.apply_weights(weights)

    assert (pair.receiver.version, constants(pair.model.linear)) == (None, {0.0})
    with pytest.raises(RefusedError, match="no thirteen here"):
        pair.sender.wait_async(timeout=PATIENCE)


def test_other_weights_applied_by_hand_refuse_the_pending_version(pair: Pair) -> None:
    pair.sender.send_async()
    pair.receiver.apply_weights(moody(3.0).state_dict())
    assert (pair.receiver.version, constants(pair.model.linear)) == (None, {3.0})

    assert refused(pair).reason == "other weights were applied by hand"


class Halfway(WeightStrategy):
    """A strategy that writes half of the weights and then raises."""

    def apply_weights(self, destination: object, weights: object, inplace: bool = True) -> None:
        assert isinstance(destination, Moody)
        nn.init.constant_(destination.linear.weight, 3.0)
        raise OSError("the disk is gone")


def test_a_model_partly_written_by_a_failed_strategy_serves_no_version(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pair.sync().ok
    monkeypatch.setattr(pair.receiver._scheme, "_strategy", Halfway("state_dict"))

    with pytest.raises(OSError, match="the disk is gone"):
        pair.receiver.apply_weights(moody(3.0).state_dict(), inplace=False)

    assert (pair.receiver.version, constants(pair.model.linear)) == (None, {1.0, 3.0})
    assert pair.sync().ok
    assert (pair.receiver.version, constants(pair.model.linear)) == (2, {1.0})


@pytest.mark.parametrize("inplace", [True, False])
def test_weights_applied_by_hand_that_do_not_fit_leave_the_served_version_unchanged(pair: Pair, inplace: bool) -> None:
    assert pair.sync().ok

    with pytest.raises(LayoutError):
        pair.receiver.apply_weights(small().state_dict(), inplace=inplace)

    assert (pair.receiver.version, constants(pair.model.linear)) == (1, {1.0})


@pytest.mark.parametrize(("scheme", "tidied"), [(SharedMemWeightSyncScheme, 1), (MultiProcessWeightSyncScheme, 0)])
def test_a_mapping_that_the_model_has_left_is_tidied_when_no_update_is_pending(
    scheme: Any, tidied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tidy, found = Mapping.tidy, []
    monkeypatch.setattr(Mapping, "tidy", lambda mapping, unwritten: (found.append(mapping), tidy(mapping, unwritten)))
    pair = Pair(scheme, model=large)
    pair.sync()
    pair.receiver.receive(timeout=0)
    assert found == []
    pair.sync()
    for _ in range(2):
        pair.receiver.receive(timeout=0)

    mapped = list(pair.receiver.driver._links[1]._mapped._mappings.values())  # type: ignore[attr-defined]
    assert (len(mapped), found) == (2, mapped[:1][:tidied])
    pair.close()


def many_small(fill: float) -> nn.Module:
    """A model whose tensors are so small that a worker keeps views of its slots, but whose payload needs a slot."""
    return filled(nn.Sequential(*(nn.Linear(64, 64) for _ in range(40))), fill)


@pytest.mark.parametrize("written", [False, True])
def test_a_slot_is_checked_for_worker_writes_while_idle_unless_a_view_of_it_is_kept(
    written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mappings, "FEW_PAGES_NBYTES", 0)
    pair = Pair(SharedMemWeightSyncScheme, model=many_small)
    for _ in range(6):  # both slots are filled again: the worker keeps its views of them
        pair.sync()
        pair.receiver.receive(timeout=0)
    kept = next(pair.model.parameters()).detach()
    if written:
        kept.fill_(7.0)
    else:
        del kept
    looks = []
    look = mappings._has_own_pages
    monkeypatch.setattr(mappings, "_has_own_pages", lambda *where: looks.append(where) or look(*where))
    pair.sync()
    pair.receiver.receive(timeout=0)
    assert bool(looks) == (not written), "while the worker waits, unless a view is kept elsewhere"
    looks.clear()
    for version in range(2):
        pair.sync()
        assert bool(looks) == (written and version == 0), "as the next version arrives"
        assert constants(pair.model) == {1.0}
        pair.receiver.receive(timeout=0)
        looks.clear()
    pair.close()


class Holder:
    """A worker's own object that has the model as an attribute."""

    policy: Any


@pytest.fixture
def staged(pair: Pair) -> Holder:
    """The context of a receiver that has staged a version but not swapped it in; its model is found by path."""
    holder = Holder()
    holder.policy = pair.model
    pair.receiver.set_context(holder)
    pair.receiver.register_model("policy")
    pair.sender.send_async()
    with pair.receiver.serving():
        assert pair.receiver.receive(timeout=0) is False
    return holder


@pytest.mark.parametrize(
    ("found", "reason"),
    [(nn.Linear(3, 1), "do not fit the destination"), (None, "weights cannot be applied to what is at 'policy': ")],
)
def test_a_staged_version_is_refused_if_another_object_replaced_the_model(
    pair: Pair, staged: Holder, found: Any, reason: str
) -> None:
    staged.policy = found
    assert pair.receiver._applier.swap_staged(0.0) is False

    assert reason in pair.receiver.last_refusal
    assert "Traceback" in pair.receiver.driver.data.answer.remote_traceback  # type: ignore[union-attr]
    assert constants(pair.model.linear) == {0.0}


def test_a_swap_without_a_pending_version_changes_nothing(pair: Pair, staged: Holder) -> None:
    assert pair.receiver._applier.swap_staged(0.0) is True
    assert pair.receiver._applier.swap_staged(0.0) is None
    assert pair.receiver.version == 1


def test_receive_and_apply_never_waits_for_a_serving_block_of_another_thread(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float | None] = []
    begin_swap = ServingLock.begin_swap

    def recorded(lock: ServingLock, timeout: float | None) -> bool:
        waits.append(timeout)
        return begin_swap(lock, timeout)

    monkeypatch.setattr(ServingLock, "begin_swap", recorded)
    pair.sender.send_async()
    assert pair.receiver._applier.receive_and_apply() is True
    assert waits == [0.0]


def test_updates_for_an_unusable_model_are_refused_with_the_error_of_its_registration(pair: Pair) -> None:
    with pytest.raises(ConfigurationError) as caught:
        pair.receiver.register_model(3)
    pair.sender.send_async()

    assert refused(pair).reason == str(caught.value)


def test_a_slot_whose_link_has_ended_is_not_tidied(pair: Pair) -> None:
    pair.sync()
    pair.receiver._applier._previous_slot = lambda: None  # a weak reference to a slot whose link has ended
    assert not pair.receiver.receive(timeout=0.0)
    assert pair.receiver._applier._previous_slot is None


@pytest.mark.parametrize("base", [None, 1])
@pytest.mark.parametrize("mode", [Mode.MAP, Mode.COPY])
def test_a_payload_that_may_be_the_base_of_a_delta_is_mapped_read_only(mode: Mode, base: int | None) -> None:
    served: Any = SimpleNamespace(apply_mode=mode)
    made = Applier(None, served, None)  # type: ignore[arg-type]
    given = memoryview(bytearray(4))

    def staged(payload: Any) -> Any:
        pending: Any = SimpleNamespace(payload=payload, update=SimpleNamespace(base=base))
        return made._payload_to_stage(pending)

    assert staged(given).readonly is (mode is Mode.MAP and base is not None)
    on_device = object()
    assert staged(on_device) is on_device


@pytest.mark.parametrize("mode", [Mode.MAP, Mode.COPY])
def test_a_version_without_a_digest_or_slot_is_named_by_the_digest_of_its_bytes(mode: Mode) -> None:
    served: Any = SimpleNamespace(apply_mode=mode)
    update = SimpleNamespace(digest=b"", extras=b"x")
    pending: Any = SimpleNamespace(update=update, slot=None, on_host=lambda: memoryview(b"1234"))

    assert Applier(None, served, None).digest_sent(pending) == digest(memoryview(b"1234"), b"x")  # type: ignore[arg-type]


def test_a_refusal_names_its_evidence(pair: Pair) -> None:
    pending: Any = SimpleNamespace(update=SimpleNamespace(incarnation=1, version=1))
    refusal = pair.receiver._applier.refusal

    assert refusal(pending, "no", "").evidence is Evidence.ANSWER
    assert refusal(pending, "no", "", Evidence.CALL).evidence is Evidence.CALL


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_version_goes_live_at_the_start_of_a_serving_block_in_a_compiled_function(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If Dynamo compiled part of the swap, it would fail halfway."""
    monkeypatch.setattr(pair.receiver, "_forwards_swap", True)
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def served() -> int | None:
        with pair.receiver.serving() as version:
            return version

    for version in (1, 2, 3):
        pair.sender.send_async(filled(pair.source, float(version)))
        with ThreadPoolExecutor(1) as pool, pair.receiver.serving():
            assert not pool.submit(pair.receiver.receive, 0.0).result(PATIENCE)
        assert served() == version
        assert pair.sender.wait_async().ok
        assert constants(pair.model.linear) == {float(version)}
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:Dynamo", "ignore:Guards may run slower on Python 3.13.0")
def test_weights_applied_by_hand_in_a_compiled_function_go_live(pair: Pair) -> None:
    """Compiled in part, the swap would fail half way, and leave a mix of old and new weights."""
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def applied(weights: Any) -> None:
        pair.receiver.apply_weights(weights)

    for fill in (1.0, 2.0):
        applied(filled(pair.source, fill))
        assert constants(pair.model.linear) == {fill}
    torch._dynamo.reset()


def test_a_version_goes_live_if_torch_cannot_tell_whether_it_is_compiling(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applier, "get_eval_frame_callback", object)

    assert pair.sync().ok
    assert constants(pair.model.linear) == {1.0}
