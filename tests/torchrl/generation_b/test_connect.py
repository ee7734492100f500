"""All forms of init in the second generation, the rendezvous, and the scheme's own send."""

from __future__ import annotations

import contextlib
import gc
import inspect
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from duo import Duo, beside
from fleet import PATIENCE, Crew, WorkerSetup, constants, filled, small
from tensordict import TensorDict
from torch import nn

import weightsync
from weightsync import (
    AckTimeoutError,
    ConfigurationError,
    EventKind,
    LayoutError,
    ModelPathError,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    OutcomeKind,
    RefusedError,
    SharedMemWeightSyncScheme,
    State,
    StateError,
    SyncEvent,
    SyncReport,
    WeightSender,
    WeightStrategy,
    WeightSyncError,
    WeightSyncScheme,
    WorkerLostError,
    register_weight_sync_backend,
)
from weightsync.protocol.sender import LinkState
from weightsync.schemes.registry import _registered

# ------------------------------------------------------------------------- pipes that the scheme creates


def connect_worker(setup: WorkerSetup, worker: int, make: Any = small) -> None:
    """Initialise and connect a worker, with the scheme that was passed to its process."""
    setup.model = make()
    setup.scheme.init_on_receiver(model_id="policy", model=setup.model, worker_idx=worker)
    setup.scheme.connect(worker_idx=worker, timeout=PATIENCE)


def held(setup: WorkerSetup) -> tuple[set[float], int | None]:
    receiver = setup.scheme.get_receiver()
    return constants(setup.model), receiver.version


def finish(setup: WorkerSetup) -> None:
    setup.scheme.shutdown()


def start_connected(crew: Crew, scheme: Any, workers: list[int]) -> list[Any]:
    """Start workers with the scheme, and connect both sides."""
    started = crew.start(scheme, len(workers))
    for worker, process in zip(workers, started, strict=True):
        process.tell(connect_worker, worker)
    scheme.connect(timeout=PATIENCE)
    for process in started:
        process.answer()
    return started


def weights(fill: float) -> TensorDict:
    extracted = WeightStrategy("tensordict").extract_weights(filled(small(), fill))
    assert isinstance(extracted, TensorDict)
    return extracted


#: Forms that give each worker its own weights. test_names_generation_b.py has the forms with the same for all.
FORMS: dict[str, dict[str, Any]] = {
    "params_map": {"params_map": {0: weights(1.0), 1: weights(2.0)}},
    "weights and device_map_fn": {
        "weights": weights(1.0),
        "device_map_fn": lambda idx, given: given + idx,
        "num_workers": 2,
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_per_worker_forms_of_init_on_sender_give_each_worker_its_first_weights(
    scheme_class: Any, crew: Crew, form: str
) -> None:
    with scheme_class(strategy="tensordict") as scheme:
        scheme.init_on_sender(**FORMS[form], ctx=crew.context)
        started = start_connected(crew, scheme, [0, 1])

        assert [process.do(held)[0] for process in started] == [{1.0}, {2.0}]
        assert scheme.send(weights(8.0)).ok
        assert [process.do(held)[0] for process in started] == [{8.0}, {8.0}]
        for process in started:
            process.do(finish)


def test_a_failed_init_on_sender_leaves_no_pipes_for_workers(scheme_class: Any) -> None:
    """A worker that was started with the scheme would use such a pipe, and wait for a sender that does not exist."""
    ours, theirs = multiprocessing.Pipe()
    with scheme_class() as scheme:
        for given in ({"processes": [None]}, {"fence": "none", "num_workers": 3}):
            with pytest.raises(ConfigurationError):
                scheme.init_on_sender(**{"model": small(), "num_workers": 2, **given})
            assert scheme._ends == {}
        scheme.init_on_sender(model=small(), pipes=[ours])
        context = SimpleNamespace(pipe=theirs, policy=small())
        scheme.init_on_receiver(model_id="policy", context=context, worker_idx=0)

        assert scheme.get_receiver()._listening.endpoint is theirs


def test_a_scheme_can_be_closed_while_it_closes_the_workers_pipe_ends(
    scheme_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a descriptor is being closed, another thread may run and close the scheme."""
    scheme = scheme_class()
    scheme.init_on_sender(model=small(), num_workers=2)
    ends = tuple(scheme._ends.values())
    entry = SimpleNamespace(link_state=LinkState.UP)
    monkeypatch.setattr(scheme, "get_sender", lambda: SimpleNamespace(workers={0: entry, 1: entry}))
    for end in ends:
        monkeypatch.setattr(end, "close", lambda end=end: (monkeypatch.undo(), scheme.close(), end.close()))

    scheme._workers_answered()

    assert all(end.closed for end in ends)


def test_worker_ids_are_the_keys_of_params_map(crew: Crew) -> None:
    with MultiProcessWeightSyncScheme() as scheme:
        scheme.init_on_sender(params_map={3: weights(3.0), 7: weights(7.0)}, ctx=crew.context)
        started = start_connected(crew, scheme, [7, 3])

        assert [process.do(held) for process in started] == [({7.0}, 2), ({3.0}, 1)]
        for process in started:
            process.do(finish)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "num_workers"),
        ({"model": small()}, "num_workers"),
        ({"params_map": {}}, "params_map"),
        ({"params_map": {-1: 0}}, "0 or more"),
        ({"params_map": {0: weights(0)}, "devices": ["cpu"]}, "not both"),
        ({"params_map": {0: weights(0)}, "num_workers": 2}, "num_workers is 2"),
        ({"devices": ["cpu"]}, "weights= or model="),
        ({"device_map_fn": lambda idx, given: given, "num_workers": 1}, "weights= or model="),
        ({"model": small(), "device_map_fn": "cpu", "num_workers": 1}, "device_map_fn= is 'cpu': give a function"),
        ({"weights": weights(0), "model": small(), "devices": ["cpu"]}, "not both"),
        ({"weights": weights(0), "device_map_fn": lambda idx, given: given}, "num_workers="),
        ({"model": small(), "num_workers": 1, "nonsense": 1}, "nonsense"),
    ],
)
def test_a_contradictory_init_on_sender_is_refused_and_can_be_retried(given: dict[str, Any], named: str) -> None:
    with MultiProcessWeightSyncScheme() as scheme:
        with pytest.raises(ConfigurationError, match=named):
            scheme.init_on_sender(**given)
        scheme.init_on_sender(model=small(), num_workers=1)


# ------------------------------------------------------------------------------------------ the rendezvous


def test_links_are_created_at_connect_if_the_scheme_creates_the_pipes() -> None:
    with MultiProcessWeightSyncScheme() as scheme:
        scheme.init_on_sender(num_workers=1)
        assert scheme.get_sender().state is State.UNINITIALIZED
        with pytest.raises(AckTimeoutError, match="have not connected"):
            scheme.connect(timeout=0)
        assert scheme.get_sender().state is State.READY
        assert not scheme.synchronized_on_sender


def test_connecting_twice_is_refused_on_both_sides(duo: Duo) -> None:
    with pytest.raises(StateError, match="connected"):
        duo.sending.connect()
    with pytest.raises(RuntimeError, match="connected"):
        duo.receiving.connect()


def test_connecting_uninitialised_or_with_the_other_sides_arguments_is_refused(duo: Duo) -> None:
    with pytest.raises(StateError, match="uninitialized"):
        MultiProcessWeightSyncScheme().connect()
    with pytest.raises(ConfigurationError, match="worker_idx"):
        duo.sending.connect(worker_idx=0)
    with pytest.raises(ConfigurationError, match="weights"):
        duo.receiving.connect(weights=weights(1.0))


def test_weights_given_to_connect_are_the_first_version(scheme_class: Any) -> None:
    duo = Duo(scheme_class, make=small)
    duo.arrive()
    with beside(lambda: duo.sending.connect(weights=weights(4.0), timeout=PATIENCE)):
        duo.receiving.connect()

    assert constants(duo.model) == {4.0}
    duo.end()


def test_connect_without_weights_succeeds_and_the_worker_has_no_version(scheme_class: Any) -> None:
    with scheme_class() as a, scheme_class() as b:
        ours, theirs = multiprocessing.Pipe()
        a.init_on_sender(model_id="policy", pipes=[ours])
        b.init_on_receiver(model_id="policy", pipe=theirs, model=small())
        with pytest.raises(AckTimeoutError, match=r"workers \[0\] .* have not connected") as late:
            a.connect(timeout=0)
        assert late.value.pending == (0,)
        with beside(lambda: a.connect(timeout=PATIENCE)):
            b.connect(timeout=PATIENCE)

        assert (a.synchronized_on_sender, b.synchronized_on_receiver) == (True, True)
        assert b.get_receiver().version is None
        assert a.send(weights(5.0)).ok
        assert constants(b.model) == {5.0}


def test_a_scheme_without_workers_can_connect_after_add_worker(scheme_class: Any) -> None:
    with scheme_class() as a, scheme_class() as b:
        ours, theirs = multiprocessing.Pipe()
        a.init_on_sender(model_id="policy", model=filled(small(), 4.0), num_workers=0)
        b.init_on_receiver(model_id="policy", pipe=theirs, model=small())
        with pytest.raises(ConfigurationError, match=r"there are no workers to send to.*add_worker\(\) adds a worker"):
            a.connect(timeout=PATIENCE)

        a.get_sender().add_worker(0, ours)
        with beside(lambda: a.connect(timeout=PATIENCE)):
            b.connect(timeout=PATIENCE)
        assert constants(b.model) == {4.0}
        assert a.send(weights(5.0)).ok


def test_connect_names_workers_lost_before_the_handshake(scheme_class: Any) -> None:
    (ours, theirs), (one, other) = multiprocessing.Pipe(), multiprocessing.Pipe()
    with scheme_class() as scheme:
        scheme.init_on_sender(model_id="policy", pipes=[ours, one])
        for end in (theirs, other):
            end.close()
        with pytest.raises(WorkerLostError, match="worker 1") as gone:
            scheme.connect(timeout=PATIENCE)

        assert list(gone.value.lost) == [0, 1]


def test_connect_names_lost_workers_although_the_context_was_garbage_collected(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    context = Collector()
    with scheme_class() as scheme:
        scheme.init_on_sender(model_id="policy", pipes=[ours], context=context)
        theirs.close()
        del context
        gc.collect()
        with pytest.raises(WorkerLostError, match="worker 0"):
            scheme.connect(weights=small(), timeout=PATIENCE)


def test_closing_a_scheme_ends_a_concurrent_connect_with_state_error(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    scheme = scheme_class()
    scheme.init_on_sender(model_id="policy", pipes=[ours])
    with pytest.raises(StateError), beside(lambda: scheme.connect(timeout=PATIENCE)):
        scheme.close()
    theirs.close()


def test_connecting_again_after_a_refused_first_version_names_the_refusal(scheme_class: Any) -> None:
    duo = Duo(scheme_class)
    duo.arrive()
    receiver = duo.receiving.get_receiver()
    assert not receiver.receive(timeout=0)  # the handshake, which fits
    receiver.register_model(nn.Linear(2, 2))

    def trainer() -> None:
        with pytest.raises(RefusedError):
            duo.sending.connect(timeout=PATIENCE)

    with beside(trainer), pytest.raises(WeightSyncError, match="the first version of 'policy' was refused"):
        duo.receiving.connect(timeout=PATIENCE)
    receiver.register_model(duo.model)

    with pytest.raises(AckTimeoutError, match=r"the last one was refused .*missing 'bias'.*have the trainer send"):
        duo.receiving.connect(timeout=0.01)
    with beside(lambda: duo.sending.get_sender().send(timeout=PATIENCE)):
        duo.receiving.connect(timeout=PATIENCE)
    assert constants(duo.model) == {1.0}
    duo.end()


def test_a_trainers_connect_that_timed_out_can_be_called_again(scheme_class: Any) -> None:
    duo = Duo(scheme_class)
    with pytest.raises(AckTimeoutError, match="never connected"):
        duo.sending.connect(timeout=0.01)
    assert not duo.sending.synchronized_on_sender
    duo.arrive()
    with beside(lambda: duo.sending.connect(timeout=PATIENCE)):
        duo.receiving.connect(timeout=PATIENCE)

    assert duo.model() == {1.0}
    duo.end()


def test_a_workers_connect_that_timed_out_can_be_called_again(scheme_class: Any) -> None:
    duo = Duo(scheme_class)
    duo.arrive()
    with pytest.raises(TimeoutError, match="in time"):
        duo.receiving.connect(timeout=0.01)
    assert not duo.receiving.synchronized_on_receiver
    assert not duo.model._forward_hooks
    with beside(lambda: duo.sending.connect(timeout=PATIENCE)):
        duo.receiving.connect(timeout=PATIENCE)
    duo.end()


def test_first_weights_that_do_not_fit_fail_on_both_sides(scheme_class: Any) -> None:
    with scheme_class() as a, scheme_class() as b:
        ours, theirs = multiprocessing.Pipe()
        a.init_on_sender(model_id="policy", pipes=[ours], model=nn.Linear(1, 1))
        b.init_on_receiver(model_id="policy", pipe=theirs, model=small())

        def worker() -> None:
            with pytest.raises(WeightSyncError, match="refused"):
                b.connect(timeout=PATIENCE)

        with beside(worker), pytest.raises(WeightSyncError, match="missing"):
            a.connect(timeout=PATIENCE)
        assert not b.synchronized_on_receiver


# ------------------------------------------------------------------------------------------------- sending


def test_a_send_before_connect_and_after_shutdown_is_refused(duo: Duo) -> None:
    with MultiProcessWeightSyncScheme() as scheme:
        with pytest.raises(StateError, match="init_on_sender"):
            scheme.send()
        with pytest.raises(StateError, match="init_on_receiver"):
            scheme.receive()
        scheme.init_on_sender(model=small(), num_workers=1)
        with pytest.raises(StateError, match="connect"):
            scheme.send()
    duo.sending.shutdown()
    with pytest.raises(StateError, match="closed"):
        duo.sending.send()


def test_a_send_abandons_an_already_reported_update_without_waiting_for_it(
    duo: Duo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duo.sending.get_sender(), "wait_async", None)  # the send must not call it
    with duo.receiving.get_receiver().serving():
        with pytest.raises(AckTimeoutError):
            duo.send(2.0, timeout=0.05)
        assert duo.send(3.0, timeout=0.05, on_failure="report")[0].kind is OutcomeKind.TIMED_OUT
    assert duo.send(4.0).ok
    assert duo.model() == {4.0}


def test_a_send_first_waits_for_unreported_updates(duo: Duo) -> None:
    duo.sending.sync = False
    assert duo.send(2.0)[0].kind is OutcomeKind.PENDING
    assert duo.send(3.0)[0].kind is OutcomeKind.PENDING
    duo.sending.sync = True

    report = duo.send(4.0)

    assert (report.version, report.ok) == (4, True)
    assert duo.model() == {4.0}


def test_with_sync_false_the_next_send_raises_the_last_failure_and_is_still_dispatched(duo: Duo) -> None:
    duo.sending.sync = False
    duo.sending.model = None  # or the trainer would refuse the weights, not the worker
    duo.sending.send({"another": torch.zeros(1)})
    duo.sending.model = duo.source

    with pytest.raises(WeightSyncError, match="another"):
        duo.send(3.0)
    duo.sending.shutdown()

    assert duo.model() == {3.0}


def test_shutdown_waits_for_the_pending_update(duo: Duo) -> None:
    duo.sending.sync = False
    duo.send(2.0)
    duo.sending.shutdown()
    duo.sending.shutdown()

    assert duo.model() == {2.0}
    assert duo.sending.get_sender().state is State.CLOSED


@pytest.mark.parametrize("what", ["another thread closes it", "another thread abandons it", "Ctrl-C"])
def test_shutdown_closes_both_sides_even_if_its_wait_is_cut_short(
    what: str, duo: Duo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sender, wait = duo.sending.get_sender(), WeightSender.wait_async
    ours, theirs = multiprocessing.Pipe()
    duo.sending.init_on_receiver(model_id="policy", model=small(), pipe=theirs)  # it has two sides to close

    def interrupted(**options: Any) -> SyncReport:
        if what == "Ctrl-C":
            raise KeyboardInterrupt
        sender.close() if what == "another thread closes it" else sender.abandon()
        return wait(sender, **options)

    duo.sending.sync = False
    with duo.receiving.get_receiver().serving():
        duo.send(2.0)
        monkeypatch.setattr(sender, "wait_async", interrupted)
        with pytest.raises(KeyboardInterrupt) if what == "Ctrl-C" else contextlib.nullcontext():
            duo.sending.shutdown()

    assert sender.state is duo.sending.get_receiver().state is State.CLOSED
    assert ("at shutdown" in caplog.text) is (what != "Ctrl-C")
    ours.close()
    theirs.close()


def test_an_interrupted_close_still_closes_both_sides_and_the_pipes(
    scheme_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    scheme = scheme_class()
    scheme.init_on_sender(model=small(1.0), num_workers=2)
    ends = dict(scheme._ends)
    scheme.init_on_receiver(model_id="policy", model=small(), worker_idx=0)
    seen: list[SyncEvent] = []
    scheme.on_event(seen.append)
    close = scheme.get_sender().close
    monkeypatch.setattr(scheme.get_sender(), "close", lambda: (close(), interrupted()))

    with pytest.raises(KeyboardInterrupt):
        scheme.close()

    assert scheme.get_sender().state is scheme.get_receiver().state is State.CLOSED
    assert all(end.closed for end in ends.values())
    assert [event.kind for event in seen].count(EventKind.CLOSED) == 2


def test_a_send_can_give_each_worker_its_own_weights(scheme_class: Any, crew: Crew) -> None:
    with scheme_class() as scheme:
        scheme.init_on_sender(model=small(1.0), num_workers=3, ctx=crew.context)
        started = start_connected(crew, scheme, [0, 1, 2])

        report = scheme.send({0: weights(4.0), 1: weights(5.0), 2: weights(4.0)})

        assert report.ok
        assert list(report) == [0, 1, 2]
        assert [process.do(held) for process in started] == [({4.0}, 2), ({5.0}, 3), ({4.0}, 2)]
        assert scheme.send({1: weights(6.0)}, worker_ids=1).version == 4
        with pytest.raises(ConfigurationError, match=r"none for workers \[0, 2\]\. Nothing"):
            scheme.send({1: weights(6.0)})
        with pytest.raises(ConfigurationError, match=r"some for \[9\], which are not among"):
            scheme.send({1: weights(6.0), 9: weights(6.0)}, worker_ids=[1])
        started[0].kill()
        with pytest.raises(WorkerLostError) as raised:
            scheme.send({0: weights(7.0), 1: weights(8.0), 2: weights(9.0)})
        assert raised.value.report.of(OutcomeKind.APPLIED) == (1, 2)
        for process in started[1:]:
            process.do(finish)


# ---------------------------------------------------------------------------------------- properties


def test_scheme_properties_describe_each_side(duo: Duo) -> None:
    sending, receiving = duo.sending, duo.receiving

    assert (sending.initialized_on_sender, sending.initialized_on_receiver) == (True, False)
    assert (receiving.initialized_on_sender, receiving.initialized_on_receiver) == (False, True)
    assert (sending.synchronized_on_sender, sending.synchronized_on_receiver) == (True, False)
    assert (receiving.synchronized_on_sender, receiving.synchronized_on_receiver) == (False, True)
    assert (sending.model, receiving.model) == (duo.source, duo.model)
    assert (sending.model_id, receiving.model_id) == ("policy", "policy")
    assert (sending.worker_idx, receiving.worker_idx) == (None, 0)
    assert receiving.strategy_str == receiving.strategy.extract_as
    assert list(sending.sender_transports) == [0]
    assert sending.receiver_transport is None
    assert receiving.receiver_transport is not None
    assert receiving.sender_transports == {}
    assert sending.shared_transport is None
    assert "mark" in receiving.weights
    with pytest.raises(StateError):
        sending.worker_idx = 1


def test_scheme_properties_are_empty_before_init() -> None:
    scheme = SharedMemWeightSyncScheme()

    seen = (scheme.model_id, scheme.context, scheme.model, scheme.weights, scheme.worker_idx, scheme.sender_transports)
    assert seen == (None, None, None, None, None, {})


def test_models_are_found_on_a_context_set_before_init(scheme_class: Any) -> None:
    trainer, worker = SimpleNamespace(policy=small(5.0)), SimpleNamespace(policy=small(0.0))
    ours, theirs = multiprocessing.Pipe()
    with scheme_class() as sending, scheme_class() as receiving:
        sending.context, receiving.context = trainer, worker
        sending.init_on_sender(model_id="policy", pipes=[ours])
        receiving.init_on_receiver(model_id="policy", pipe=theirs, worker_idx=0)
        with beside(lambda: sending.connect(timeout=PATIENCE)):
            receiving.connect(timeout=PATIENCE)

        assert constants(worker.policy) == {5.0}


@pytest.mark.parametrize("other", ["policy", "get_model", "get_cached_weights", "cached_weights"])
def test_setting_the_model_overrides_the_source_from_init_until_it_is_set_to_none(
    scheme_class: Any, other: str
) -> None:
    held, model = {"policy": small(5.0)}, small(0.0)
    context = SimpleNamespace(**{other: held["policy"] if other == "policy" else held.get})
    given = {"cached_weights": held["policy"].state_dict()} if other == "cached_weights" else {"context": context}
    ours, theirs = multiprocessing.Pipe()
    with scheme_class() as sending, scheme_class() as receiving:
        sending.init_on_sender(model_id="policy", pipes=[ours], **given)
        receiving.init_on_receiver(model_id="policy", pipe=theirs, model=model, worker_idx=0)
        sending.model = small(7.0)
        with beside(lambda: sending.connect(timeout=PATIENCE)):
            receiving.connect(timeout=PATIENCE)

        assert constants(model) == constants(sending.model) == {7.0}
        sending.model = None
        assert sending.send(timeout=PATIENCE).ok
        assert constants(model) == {5.0}


def test_a_model_set_before_init_is_sent_unless_init_is_given_another(scheme_class: Any) -> None:
    for given, sent in (({}, {7.0}), ({"model": small(5.0)}, {5.0})):
        ours, theirs = multiprocessing.Pipe()
        model = small(0.0)
        with scheme_class() as sending, scheme_class() as receiving:
            sending.model = small(7.0)
            sending.init_on_sender(model_id="policy", pipes=[ours], **given)
            receiving.init_on_receiver(model_id="policy", pipe=theirs, model=model, worker_idx=0)
            with beside(lambda: sending.connect(timeout=PATIENCE)):
                receiving.connect(timeout=PATIENCE)

            assert constants(model) == constants(sending.model) == sent


def test_a_send_with_fewer_than_expected_workers_is_refused(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs, scheme_class() as sending:
        sending.init_on_sender(model_id="policy", pipes=[ours], model=small(1.0), expected_workers=2)

        with pytest.raises(ConfigurationError, match="2 workers"):
            sending.get_sender().send_async()


class RaisingContext:
    """A context with a policy, whose `get_model` raises."""

    def __init__(self) -> None:
        self.policy = small(1.0)

    def get_model(self, model_id: str) -> Any:
        raise ValueError(f"the checkpoint of {model_id!r} is corrupt")


def test_an_error_in_get_model_fails_init_instead_of_using_another_model(scheme_class: Any) -> None:
    ours, _theirs = multiprocessing.Pipe()
    context = RaisingContext()
    with scheme_class() as scheme, pytest.raises(ValueError, match="is corrupt"):
        scheme.init_on_sender(model_id="policy", pipes=[ours], context=context)
    with scheme_class() as worker, pytest.raises(ValueError, match="is corrupt"):
        worker.init_on_receiver(model_id="policy", pipe=ours, context=context, worker_idx=0)


class UnknownModel(KeyError):
    """What a context of the user's raises."""


class Models(dict[str, nn.Module]):
    def __missing__(self, key: str) -> NoReturn:
        raise UnknownModel(key)


@pytest.mark.parametrize(("models", "error"), [(dict, "KeyError"), (Models, "UnknownModel")])
def test_a_key_error_in_get_model_becomes_a_model_path_error_with_advice(
    scheme_class: Any, models: Any, error: str
) -> None:
    ours, _theirs = multiprocessing.Pipe()
    context = SimpleNamespace(get_model=models(policy=small(1.0)).__getitem__)
    said = rf"get_model\('critic'\) of a SimpleNamespace raised {error}: 'critic'. Have it return .* give both sides"
    with scheme_class() as scheme, pytest.raises(ModelPathError, match=said):
        scheme.init_on_sender(model_id="critic", pipes=[ours], context=context)
    with scheme_class() as worker, pytest.raises(ModelPathError, match=said):
        worker.init_on_receiver(model_id="critic", pipe=ours, context=context, worker_idx=0)


class Collector:
    pass


def test_a_context_set_after_init_is_held_weakly(duo: Duo) -> None:
    assert duo.receiving.context is None
    later = Collector()
    duo.receiving.context = later

    assert duo.receiving.context is later
    del later
    assert duo.receiving.context is None


def test_the_receivers_model_and_worker_idx_are_found_on_the_context(scheme_class: Any) -> None:
    duo = Duo(scheme_class, make=small)
    collector = SimpleNamespace(policy=duo.model, worker_idx=0)
    duo.arrive(model=None, context=collector)
    with beside(lambda: duo.sending.connect(timeout=PATIENCE)):
        duo.receiving.connect(timeout=PATIENCE)

    assert duo.receiving.worker_idx == 0
    assert duo.receiving.model is duo.model
    assert constants(duo.model) == {1.0}
    duo.end()


def test_noweightsyncscheme_receive_returns_none_on_the_sender_and_before_init() -> None:
    scheme = NoWeightSyncScheme()
    scheme.init_on_sender(model_id="policy")
    scheme.connect()

    assert scheme.receive() is None
    assert scheme.receive(timeout=1.0) is None
    assert NoWeightSyncScheme().receive() is None
    scheme.shutdown()


def test_noweightsyncscheme_send_reaches_no_workers_before_connect_and_raises_when_closed() -> None:
    scheme = NoWeightSyncScheme()
    assert len(scheme.send(small(1.0))) == 0
    scheme.init_on_sender(model_id="policy")
    assert len(scheme.send(worker_ids=[3])) == 0
    scheme.shutdown()

    with pytest.raises(StateError, match="closed"):
        scheme.send()


def test_noweightsyncscheme_can_be_initialised_after_a_failed_init() -> None:
    with NoWeightSyncScheme() as worker:
        with pytest.raises(ConfigurationError, match=r"builtins\.int"):
            worker.init_on_receiver(model_id="policy", model=3)
        assert not worker.initialized_on_receiver
        worker.init_on_receiver(model_id="policy", model=small(1.0))

        assert constants(worker.model) == {1.0}


def test_noweightsyncscheme_can_connect_repeatedly_until_it_is_closed() -> None:
    trainer, worker = NoWeightSyncScheme(), NoWeightSyncScheme()
    trainer.init_on_sender(model_id="policy")
    worker.init_on_receiver(model_id="policy")
    for scheme in (trainer, trainer, worker, worker):
        scheme.connect()

    assert trainer.synchronized_on_sender
    assert worker.synchronized_on_receiver
    for scheme in (trainer, worker):
        scheme.shutdown()
        with pytest.raises(StateError, match="closed"):
            scheme.connect()


def test_noweightsyncscheme_connects_without_links_and_applies_weights_given_by_hand() -> None:
    with NoWeightSyncScheme() as scheme, NoWeightSyncScheme() as worker:
        scheme.init_on_sender(model_id="policy")
        worker.init_on_receiver(model_id="policy", model=small(1.0))
        scheme.connect()
        worker.connect(worker_idx=0)

        assert len(scheme.send()) == 0
        assert worker.receive(timeout=0) is None
        assert worker.receive() is None
        worker.apply_weights(small(2.0).state_dict())
        assert constants(worker.model) == {2.0}
        worker.shutdown()
        worker.shutdown()
        with pytest.raises(StateError, match="closed"):
            worker.apply_weights(small(3.0).state_dict())


# ------------------------------------------------------------------------------------------- constructors


@pytest.mark.parametrize(
    ("given", "named", "expected"),
    [
        ((), {}, ("tensordict", True, False)),
        (("state_dict",), {}, ("state_dict", True, False)),
        ((WeightStrategy("state_dict"), False), {}, ("state_dict", False, False)),
        (("tensordict", False, True), {}, ("tensordict", False, True)),
        (("tensordict", True, False), {}, ("tensordict", True, False)),
        (("tensordict",), {"sync": False, "per_worker_weights": True}, ("tensordict", False, True)),
        ((), {"strategy": "state_dict", "sync": False}, ("state_dict", False, False)),
        (({},), {"strategy": "state_dict"}, ("state_dict", True, False)),
        (({}, "state_dict", False), {}, ("state_dict", True, False)),
        ((None, "tensordict", True), {"sync": False}, ("tensordict", False, False)),
    ],
)
def test_shared_memory_takes_both_generations_arguments(given: Any, named: Any, expected: Any) -> None:
    scheme = SharedMemWeightSyncScheme(*given, **named)

    assert (scheme.strategy_str, scheme.sync, scheme.per_worker_weights) == expected


def test_shared_memory_refuses_arguments_of_neither_generation() -> None:
    with pytest.raises(ConfigurationError, match="strategy"):
        SharedMemWeightSyncScheme(None, True)


def test_multiprocess_takes_strategy_and_sync() -> None:
    assert list(inspect.signature(MultiProcessWeightSyncScheme.__init__).parameters)[1:3] == ["strategy", "sync"]
    assert MultiProcessWeightSyncScheme("tensordict", False).sync is False


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("none", "NoWeightSyncScheme"),
        ("direct", "NoWeightSyncScheme"),
        ("shared", "SharedMemWeightSyncScheme"),
        ("thread", "SharedMemWeightSyncScheme"),
        ("process", "MultiProcessWeightSyncScheme"),
        ("multiprocessing", "MultiProcessWeightSyncScheme"),
    ],
)
def test_from_backend_gives_the_scheme_of_that_name(backend: str, expected: str) -> None:
    scheme = WeightSyncScheme.from_backend(backend, strategy="state_dict")

    assert type(scheme) is getattr(weightsync, expected)
    assert scheme.strategy == "state_dict"


def test_a_custom_backend_is_registered_by_name() -> None:
    @register_weight_sync_backend("mine")
    class Mine(NoWeightSyncScheme):
        pass

    try:
        assert type(WeightSyncScheme.from_backend("mine")) is Mine
    finally:
        del _registered["mine"]
    with pytest.raises(ConfigurationError, match="choose one of direct, distributed"):
        WeightSyncScheme.from_backend("mine")


PLUGGED = {"plugged": "Mine", "shared": "Mine", "lacking": "Missing"}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with entry points: a new backend, one with the name of ours, and one without its attribute."""
    names = "".join(f"{name} = installed_plugin:{it}\n" for name, it in PLUGGED.items())
    (tmp_path / "installed_plugin.py").write_text("from weightsync import NoWeightSyncScheme as Mine", "utf-8")
    (tmp_path / "installed_plugin-1.dist-info").mkdir()
    (tmp_path / "installed_plugin-1.dist-info" / "METADATA").write_text("Name: installed_plugin\nVersion: 1\n", "utf-8")
    (tmp_path / "installed_plugin-1.dist-info" / "entry_points.txt").write_text(
        f"[weightsync.transports]\n{names}", "utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
def test_an_installed_package_provides_backends_through_entry_points() -> None:
    assert type(WeightSyncScheme.from_backend("plugged")) is NoWeightSyncScheme
    assert type(WeightSyncScheme.from_backend("shared")) is SharedMemWeightSyncScheme
    with pytest.raises(
        ConfigurationError, match=r"'lacking' is 'installed_plugin:Missing' of an installed package .*no attribute"
    ):
        WeightSyncScheme.from_backend("lacking")
    with pytest.raises(ConfigurationError, match="lacking, multiprocessing, none, plugged"):
        WeightSyncScheme.from_backend("mine")


def test_modules_tensordicts_and_dicts_by_name_are_not_per_worker_weights() -> None:
    assert not weightsync.schemes.worker_set.is_per_worker(nn.Linear(1, 1))
    assert not weightsync.schemes.worker_set.is_per_worker(TensorDict({}))
    assert not weightsync.schemes.worker_set.is_per_worker({"a": 1})


def test_has_factories_is_true_only_for_different_policy_factories() -> None:
    one, other = (lambda: small(1.0)), (lambda: small(2.0))
    has_factories = weightsync.schemes.worker_set.has_factories
    contexts = [SimpleNamespace(policy_factory=given) for given in (one, [one], [one, one], [one, other], (other, one))]

    assert [has_factories(context) for context in contexts] == [False, False, False, True, True]
    assert not has_factories(None)


# -------------------------------------------------------------------------------------- models without weights


def test_a_model_on_the_meta_device_gets_its_first_values_at_connect(scheme_class: Any) -> None:
    duo = Duo(scheme_class, make=tied)
    duo.model = tied(0.0).to("meta")
    duo.model.b.weight = duo.model.a.weight
    duo.connect()

    assert constants(duo.model) == {1.0}
    assert duo.model.a.weight is duo.model.b.weight
    assert duo.send(2.0).ok
    assert constants(duo.model) == {2.0}
    duo.end()


def tied(fill: float) -> nn.Module:
    model = nn.Module()
    model.a, model.b = nn.Linear(3, 3), nn.Linear(3, 3)
    model.b.weight = model.a.weight
    return filled(model, fill)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
def test_a_model_that_takes_no_hooks_is_refused_by_connect_but_can_receive(scheme_class: Any) -> None:
    duo = Duo(scheme_class, make=small)
    duo.model = torch.jit.script(duo.model)
    duo.arrive()
    with pytest.raises(ConfigurationError, match=r"ScriptModule takes no hooks .*receive\(\) between forwards"):
        duo.receiving.connect(timeout=PATIENCE)
    receiver = duo.receiving.get_receiver()
    with beside(lambda: duo.sending.connect(timeout=PATIENCE)):
        while receiver.version is None:
            receiver.receive(timeout=1.0)
    assert constants(duo.model) == {1.0}
    duo.end()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
def test_a_model_that_takes_no_hooks_cannot_replace_a_guarded_model(duo: Duo) -> None:
    with pytest.raises(ConfigurationError, match="takes no hooks"):
        duo.receiving.get_receiver().register_model(torch.jit.script(small()))

    assert duo.send(2.0, timeout=PATIENCE).ok
    assert duo.model() == {2.0}


def test_a_meta_model_still_counts_as_without_weights_after_a_refused_init() -> None:
    ours, theirs = multiprocessing.Pipe()
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with MultiProcessWeightSyncScheme() as sending, MultiProcessWeightSyncScheme() as receiving:
        with pytest.raises(ConfigurationError, match="pipe"):
            receiving.init_on_receiver(model_id="policy", model=model, worker_idx=0)
        with pytest.raises(ConfigurationError, match="names= receives only some"):
            receiving.init_on_receiver(model_id="policy", model=model, worker_idx=0, names="weight", pipe=theirs)
        with pytest.raises(ConfigurationError, match="NoWeightSyncScheme sends none"):
            NoWeightSyncScheme().init_on_receiver(model_id="policy", model=model)

        receiving.init_on_receiver(model_id="policy", model=model, worker_idx=0, pipe=theirs)
        sending.init_on_sender(model_id="policy", pipes=[ours])
        with pytest.raises(ConfigurationError, match="came without its weights"), connecting(sending):
            receiving.connect(timeout=PATIENCE)


def test_a_meta_model_is_refused_at_each_connect_until_weights_are_sent() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    source = nn.Linear(2, 2)
    for sent, said in (
        (None, "came without its weights"),
        (None, "came without its weights"),
        (source, ""),
        (None, ""),
    ):
        ours, theirs = multiprocessing.Pipe()
        with MultiProcessWeightSyncScheme() as sending, MultiProcessWeightSyncScheme() as receiving:
            receiving.init_on_receiver(model_id="policy", model=model, worker_idx=0, pipe=theirs)
            sending.init_on_sender(model_id="policy", pipes=[ours], model=sent)
            refused = pytest.raises(ConfigurationError, match=said) if said else contextlib.nullcontext()
            with refused, connecting(sending):
                receiving.connect(timeout=PATIENCE)

    assert torch.equal(model.weight, source.weight)


@contextlib.contextmanager
def connecting(sending: Any) -> Iterator[None]:
    """Connect the trainer's scheme during the block, though its worker may end in the block."""

    def connect() -> None:
        with contextlib.suppress(WorkerLostError):
            sending.connect(timeout=PATIENCE)

    with beside(connect):
        yield


def test_a_non_persistent_meta_buffer_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("cache", torch.zeros(1), persistent=False)
    model.to("meta")
    with MultiProcessWeightSyncScheme() as scheme, pytest.raises(LayoutError, match=r"cache.* policy_factory=\."):
        scheme.init_on_receiver(model_id="policy", model=model, pipe=None)
    assert model.weight.is_meta
