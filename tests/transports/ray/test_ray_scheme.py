"""Ray actors as workers: sends to each kind of actor."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray_fleet import PATIENCE, constants_of, filled, init_by_hand, ray, set_policy, small
from torch import nn

from weightsync import (
    AuthenticationError,
    ConfigurationError,
    Evidence,
    ModelPathError,
    OutcomeKind,
    RayModuleTransformScheme,
    RayWeightSyncScheme,
    RefusedError,
    State,
    WeightSyncScheme,
    WorkerLostError,
)
from weightsync.keys import SharedKey
from weightsync.protocol.codec import encode
from weightsync.protocol.messages import Hello, Update
from weightsync.schemes import ray_server
from weightsync.transports.calls.client import EARLY, UNKNOWN
from weightsync.transports.calls.server import Parcel, decoded
from weightsync.transports.ray.client import TRANSPORT_NAME
from weightsync.transports.sealing import Challenged, EnvelopeKind, Identity, KeyedSeal
from weightsync.weights.tensors import bits_of


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=PATIENCE)


def test_actors_with_the_mixin_answer_and_serve_the_sent_weights(setups: list[Any], trainer: Any) -> None:
    sender = trainer(setups, small(3.0))

    report = sender.send(timeout=PATIENCE)

    assert report.ok
    assert [Evidence.ANSWER, Evidence.ANSWER] == [report[worker].evidence for worker in report]
    assert [{3.0}, {3.0}] == get([setup.shows.remote() for setup in setups])
    assert [1, 1] == get([setup.version.remote() for setup in setups])
    assert sender.digest() == get(setups[0].do.remote(_digest))


def _digest(actor: Any) -> bytes:
    return actor.weight_receiver().digest()


@pytest.mark.usefixtures("through_store")
def test_one_put_serves_all_workers_and_a_late_joiner(
    setups: list[Any], trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    puts: list[Any] = []
    real = ray.put
    monkeypatch.setattr(ray, "put", lambda *args, **kwargs: (puts.append(args), real(*args, **kwargs))[1])
    sender = trainer(setups[:1], small(1.0))

    sender.send(timeout=PATIENCE)
    sender.add_worker(1, setups[1])
    _until(lambda: sender.poll() is None and sender.workers[1].served == 1)
    assert len(puts) == 1

    sender.send(small(2.0), timeout=PATIENCE)
    assert len(puts) == 2
    assert [{2.0}, {2.0}] == get([setup.shows.remote() for setup in setups])


def _until(condition: Any) -> None:
    for _ in range(int(PATIENCE / 0.02)):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("the condition did not hold in time")


@pytest.mark.usefixtures("through_store")
def test_closing_a_sender_releases_its_payload_in_the_object_store(setups: list[Any], trainer: Any) -> None:
    sender = trainer(setups, small(1.0))
    sender.send(timeout=PATIENCE)
    cache = sender._scheme._links._flat._cache
    assert len(cache._objects) == 1

    sender.close()

    assert len(cache._objects) == 0


def _remove_worker(sender: Any) -> None:
    sender.remove_worker(0)
    sender.send(timeout=PATIENCE)


def _close_sender(sender: Any) -> None:
    sender.close()


@pytest.mark.parametrize("leave", [_remove_worker, _close_sender])
def test_an_actor_that_left_is_not_kept_alive_by_its_former_scheme(setups: list[Any], trainer: Any, leave: Any) -> None:
    """Ray ends an actor when its last handle is gone."""
    handle = ray.get(ray.put(setups[0]))
    last = weakref.ref(handle)
    sender = trainer([handle, setups[1]], small(1.0))
    sender.send(timeout=PATIENCE)
    leave(sender)

    del handle
    given_up = time.monotonic() + PATIENCE  # the goodbye is a call, which takes a moment
    while last() is not None and time.monotonic() < given_up:
        gc.collect()
        time.sleep(0.01)
    assert last() is None


def test_small_payloads_travel_in_the_call_and_large_ones_on_the_same_host_are_mapped(
    setups: list[Any], trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    get([setup.do.remote(set_policy, nn.Linear, 200, 200) for setup in setups])
    sender = trainer(setups, nn.Linear(200, 200))
    assert sender.send(timeout=PATIENCE).ok
    monkeypatch.setattr(ray, "put", _no_put)

    for fill in (1.0, 2.0, 3.0):
        assert sender.send(filled(nn.Linear(200, 200), fill), timeout=PATIENCE).ok
        assert [{fill}, {fill}] == get([setup.shows.remote() for setup in setups])
        assert sender.digest() == get(setups[0].do.remote(_digest))

    get(setups[0].start_over.remote())
    assert trainer(setups[:1], small(4.0)).send(timeout=PATIENCE).ok
    assert get(setups[0].shows.remote()) == {4.0}


def test_an_actor_that_already_serves_the_version_accepts_a_new_link(setups: list[Any], trainer: Any) -> None:
    """Over a new link the weights travel until it is answered; over the former one, the actor mapped them."""
    get(setups[0].do.remote(set_policy, nn.Linear, 200, 200))
    sender = trainer(setups[:1], nn.Linear(200, 200))
    for fill in (1.0, 2.0):
        assert sender.send(filled(nn.Linear(200, 200), fill), timeout=PATIENCE).ok
    for fill in (3.0, 4.0):
        sender.add_worker(0, setups[0])
        _until(lambda: sender.poll() is None and sender.workers[0].served == sender.version)
        assert sender.send(filled(nn.Linear(200, 200), fill), timeout=PATIENCE).ok
        assert get(setups[0].shows.remote()) == {fill}


def _no_put(*_: Any, **__: Any) -> Any:
    raise AssertionError("the payload was put into Ray's object store")


@pytest.mark.usefixtures("through_store")
def test_a_payload_in_the_object_store_is_read_in_place(setups: list[Any], trainer: Any) -> None:
    get(setups[0].do.remote(_note_payloads))

    trainer(setups[:1], nn.Linear(300, 300)).send(timeout=PATIENCE, on_failure="report")

    readonly, owns_memory, nbytes = get(setups[0].do.remote(lambda actor: actor.kept["payload"]))
    assert readonly
    assert not owns_memory
    assert nbytes == 4 * 300 * 301


def _note_payloads(actor: Any) -> None:
    """Record properties of the payload that Ray passes to the actor's hidden method."""
    actor.policy = nn.Linear(300, 300)
    actor_server = actor._weightsync_server("policy")
    inner = actor_server.call

    def call(parcel: Any, lost: Any) -> Any:
        if parcel.payload is not None:
            view = parcel.payload
            actor.kept["payload"] = view.readonly, view.obj.flags.owndata, view.nbytes
        return inner(parcel, lost)

    actor_server.call = call


def test_weights_of_every_dtype_arrive_bit_identical(setups: list[Any], trainer: Any) -> None:
    weights = _weights_of_many_dtypes(7)
    get(setups[0].do.remote(set_policy, _weights_of_many_dtypes, 0))

    trainer(setups[:1]).send(weights, timeout=PATIENCE)

    assert get(setups[0].do.remote(lambda actor: _bits(actor.policy))) == _bits(weights)


def _bits(weights: dict[str, torch.Tensor]) -> dict[str, tuple[str, bytes]]:
    """The weights as bytes, since torch cannot unpickle all dtypes."""
    return {name: (str(tensor.dtype), bytes(bits_of(tensor).tolist())) for name, tensor in weights.items()}


def _weights_of_many_dtypes(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    made: dict[str, torch.Tensor] = {
        str(dtype).removeprefix("torch."): torch.randn(5, 3).to(dtype)
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool)
    }
    made["fp8"] = torch.randn(8).to(torch.float8_e4m3fn)
    made["complex"] = torch.randn(4, dtype=torch.complex64)
    made["strided"] = torch.randn(6, 4).t()[:, ::2]
    made["empty"] = torch.empty(0, 3)
    return made


def test_the_strategy_decides_the_form_of_the_weights_for_plain_actors(plain: Any, trainer: Any) -> None:
    for strategy, type_name, fill in (("state_dict", "dict", 2.0), ("tensordict", "TensorDict", 4.0)):
        report = trainer([plain], small(fill), strategy=strategy).send(timeout=PATIENCE)

        assert report[0].evidence is Evidence.CALL
        assert get(plain.do.remote(lambda actor: actor.kept["type"])) == type_name
        assert get(plain.shows.remote()) == {fill}


def test_a_plain_actor_that_raises_refuses_with_its_traceback(plain: Any, setups: list[Any], trainer: Any) -> None:
    get(plain.do.remote(lambda actor: actor.kept.update({"raise": True})))
    sender = trainer([plain, setups[0]], small(5.0))

    with pytest.raises(RefusedError, match="these weights are not for me") as refused:
        sender.send(timeout=PATIENCE)

    outcome = refused.value.report[0]
    assert outcome.kind is OutcomeKind.REFUSED
    assert outcome.evidence is Evidence.CALL
    assert "update_policy_weights_" in outcome.remote_traceback
    assert "\x1b" not in str(refused.value)
    assert refused.value.report[1].kind is OutcomeKind.APPLIED

    get(plain.do.remote(lambda actor: actor.kept.clear()))
    assert sender.send(timeout=PATIENCE).ok


def test_a_plain_actor_whose_exception_cannot_be_unpickled_stays_a_member(plain: Any, trainer: Any) -> None:
    get(plain.do.remote(lambda actor: actor.kept.update({"raise with parts": True})))
    sender = trainer([plain], small(5.0))

    with pytest.raises(RefusedError, match=r"NotUnpickled: these weights are not for me\)") as refused:
        sender.send(timeout=PATIENCE)

    assert refused.value.report[0].evidence is Evidence.CALL
    get(plain.do.remote(lambda actor: actor.kept.clear()))
    assert sender.send(timeout=PATIENCE).ok


def test_a_plain_actor_that_raises_stop_iteration_refuses_with_its_traceback(plain: Any, trainer: Any) -> None:
    """Ray wraps a StopIteration in a RuntimeError."""
    get(plain.do.remote(lambda actor: actor.kept.update({"raise StopIteration": True})))
    sender = trainer([plain], small(5.0))

    with pytest.raises(RefusedError, match=r"StopIteration\)") as refused:
        sender.send(timeout=PATIENCE)

    assert "update_policy_weights_" in refused.value.report[0].remote_traceback
    get(plain.do.remote(lambda actor: actor.kept.clear()))
    assert sender.send(timeout=PATIENCE).ok


def test_one_sender_serves_actors_with_and_without_a_receiver(plain: Any, setups: list[Any], trainer: Any) -> None:
    assert trainer([setups[0], plain], small(6.0)).send(timeout=PATIENCE).ok

    assert [{6.0}, {6.0}] == [get(actor.shows.remote()) for actor in (setups[0], plain)]


def test_an_update_that_does_not_fit_is_refused_and_nothing_changes(setups: list[Any], trainer: Any) -> None:
    sender = trainer(setups[:1])
    sender.send(small(1.0), timeout=PATIENCE)

    with pytest.raises(RefusedError) as refused:
        sender.send({"other": torch.zeros(3)}, timeout=PATIENCE)

    assert refused.value.report[0].evidence is Evidence.ANSWER
    assert get(setups[0].shows.remote()) == {1.0}
    assert sender.send(filled(small(), 2.0), timeout=PATIENCE).ok


@pytest.mark.parametrize("how", ["model", "context"])
def test_an_actor_may_initialise_its_own_scheme(setups: list[Any], trainer: Any, how: str) -> None:
    assert get(setups[0].do.remote(init_by_hand, how)) == "uninitialized"

    trainer(setups[:1], small(8.0)).send(timeout=PATIENCE)

    assert get(setups[0].shows.remote()) == {8.0}
    assert get(setups[0].do.remote(lambda actor: actor.kept["scheme"].get_receiver().version)) == 1


def test_an_actor_may_create_its_model_after_the_handshake(setups: list[Any], trainer: Any) -> None:
    get(setups[0].do.remote(_without_model))
    sender = trainer(setups[:1], small(9.0), model_id="critic")
    get(setups[0].do.remote(lambda actor: actor.__dict__.update(critic=small())))

    assert sender.send(timeout=PATIENCE).ok
    assert get(setups[0].do.remote(lambda actor: constants_of(actor.critic.state_dict()))) == {9.0}


def test_a_lazy_model_may_be_initialised_after_the_handshake(setups: list[Any], trainer: Any) -> None:
    get(setups[0].do.remote(lambda actor: actor.__dict__.update(critic=nn.LazyLinear(3))))
    source = nn.Linear(4, 3)
    sender = trainer(setups[:1], source, model_id="critic")
    get(setups[0].do.remote(lambda actor: actor.critic(torch.zeros(1, 4))))

    assert sender.send(timeout=PATIENCE).ok
    assert torch.equal(get(setups[0].do.remote(lambda actor: actor.critic.weight.detach())), source.weight)


def _without_model(actor: Any) -> None:
    actor.policy = None
    actor.__dict__.pop("critic", None)


def test_an_actor_without_the_model_is_lost_and_the_reason_names_the_model(setups: list[Any], trainer: Any) -> None:
    get(setups[0].do.remote(_without_model))
    sender = trainer(setups[:1], small(9.0), model_id="critic")

    report = sender.send(timeout=PATIENCE, on_failure="report")

    assert report[0].kind is OutcomeKind.LOST
    assert "critic" in report[0].reason
    get(setups[0].do.remote(lambda actor: actor.__dict__.update(critic=small())))
    sender.add_worker(0, setups[0])
    assert sender.send(timeout=PATIENCE).ok


def _get_models_from(actor: Any, models: dict[str, nn.Module] | None) -> None:
    if models is None:
        del actor.get_model
    else:
        actor.get_model = models.__getitem__


def test_an_error_in_an_actors_get_model_is_reported_with_its_type(setups: list[Any], trainer: Any) -> None:
    get(setups[0].do.remote(_get_models_from, {}))

    report = trainer(setups[:1], small(9.0), model_id="critic").send(timeout=PATIENCE, on_failure="report")

    get(setups[0].do.remote(_get_models_from, None))
    assert report[0].kind is OutcomeKind.LOST
    assert "get_model('critic') of a WorkerSetup raised KeyError: 'critic'. Have it return" in report[0].reason


def _ambiguous(actor: Any) -> None:
    _without_model(actor)
    actor.policy = actor.module = small()


def test_weights_of_another_model_are_never_written_into_the_policy(setups: list[Any], trainer: Any) -> None:
    get(setups[0].do.remote(_ambiguous))

    report = trainer(setups[:1], small(9.0), model_id="critic").send(timeout=PATIENCE, on_failure="report")

    assert report[0].kind is OutcomeKind.LOST
    assert get(setups[0].shows.remote()) == {0.0}


def test_a_newer_sender_fences_an_older_one(setups: list[Any], trainer: Any) -> None:
    older, newer = trainer(setups[:1], small(1.0)), trainer(setups[:1], small(2.0))
    newer.send(timeout=PATIENCE)

    report = older.send(timeout=PATIENCE, on_failure="report")

    assert report[0].kind is OutcomeKind.LOST
    assert report[0].fence == newer.incarnation
    assert get(setups[0].shows.remote()) == {2.0}


def test_copies_keep_the_actors_and_have_no_outstanding_update(setups: list[Any], trainer: Any) -> None:
    sender = trainer(setups[:1], small(1.0))
    sender.send_async()

    twin = copy.copy(sender)
    copied = copy.copy(sender._scheme)

    with pytest.raises(RuntimeError, match="uninitialized"):
        copied.get_sender()
    assert sender.wait_async(timeout=PATIENCE).ok
    with twin:
        assert (twin.state, twin.worker_ids) == (State.UNINITIALIZED, (0,))
        assert twin.send(small(2.0), timeout=PATIENCE).ok
    assert get(setups[0].shows.remote()) == {2.0}
    travelled = ray.get(ray.put(sender._scheme))
    assert isinstance(travelled, RayWeightSyncScheme)
    assert travelled.strategy == "state_dict"


def test_an_object_that_is_not_an_actor_is_refused_at_init(cluster: Any) -> None:
    with pytest.raises(ConfigurationError, match="WeightSyncActor"):
        RayWeightSyncScheme().init_on_sender("policy", remote_collectors=[SimpleNamespace()], model=small())


@pytest.mark.parametrize("given", [{}, {"num_workers": 3}, {"num_collectors": 1}])
def test_missing_actors_and_wrong_counts_are_named_by_init(setups: list[Any], given: dict[str, Any]) -> None:
    scheme, actors = RayWeightSyncScheme(), {"remote_collectors": setups} if given else {}

    with pytest.raises(ConfigurationError, match=r"remote_collectors|num_"):
        scheme.init_on_sender("policy", model=small(), **actors, **given)


def test_a_context_gives_what_is_not_given(setups: list[Any]) -> None:
    class Trainer:
        actor_refs = setups
        num_collectors = 2

        def get_model(self, model_id: str) -> nn.Module:
            return source

    source, context = small(4.0), Trainer()
    with RayWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", context)
        assert scheme.get_sender().send(timeout=PATIENCE).ok
    assert get(setups[1].shows.remote()) == {4.0}


def test_unavailable_and_unknown_tensor_transports_raise_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError, match="nixl"):
        RayWeightSyncScheme(tensor_transport="nixl")
    with pytest.raises(ValueError, match="object_store"):
        RayWeightSyncScheme(tensor_transport="carrier pigeon")


def test_the_constructor_takes_the_arguments_of_both_generations() -> None:
    assert RayWeightSyncScheme("tensordict", "nccl").strategy == "tensordict"
    assert RayWeightSyncScheme().strategy == "state_dict"


# ------------------------------------------------------------------------------------------- generation B


def _as_in_generation_b(actor: Any) -> tuple[bool, bool]:
    scheme = actor.kept["scheme"] = WeightSyncScheme.from_backend("ray", strategy="tensordict")
    scheme.init_on_receiver(model_id="policy", context=actor, worker_idx=1)
    scheme.connect()
    return scheme.initialized_on_receiver, scheme.synchronized_on_receiver


def _serves(actor: Any) -> int | None:
    return actor.kept["scheme"].get_receiver().version


def test_generation_b_connects_and_sends(setups: list[Any]) -> None:
    assert (True, True) == get(setups[1].do.remote(_as_in_generation_b))
    scheme = RayWeightSyncScheme("tensordict", backend="gloo")
    context = SimpleNamespace(remote_collectors=setups, num_collectors=2, policy=small(3.0))
    scheme.init_on_sender(model_id="policy", context=context)
    try:
        scheme.connect()
        assert scheme.synchronized_on_sender
        assert [{3.0}, {3.0}] == get([setup.shows.remote() for setup in setups])

        report = scheme.send(small(4.0), worker_ids=[1])
        assert report[1].evidence is Evidence.ANSWER
        assert [{3.0}, {4.0}] == get([setup.shows.remote() for setup in setups])
        assert get(setups[1].do.remote(_serves)) == 2
        assert scheme.send({0: small(5.0), 1: small(6.0)}).ok
        assert [{5.0}, {6.0}] == get([setup.shows.remote() for setup in setups])
    finally:
        scheme.shutdown()


# ------------------------------------------------------------------------------------ the actor server, without Ray


def test_a_link_whose_first_call_is_missing_is_refused_at_once() -> None:
    actor_server = ray_server.ActorServer("policy")

    with pytest.raises(ConnectionError, match="restarted"):
        actor_server.call(_parcel(number=3), ())


def test_a_threaded_actor_answers_a_call_of_an_unknown_link_at_once() -> None:
    actor_server = ray_server.ActorServer("policy")

    with ThreadPoolExecutor(1) as thread:
        (frame,) = thread.submit(actor_server.call, _parcel(number=3), ()).result(timeout=20.0)

    assert frame.startswith(UNKNOWN)
    assert b"restarted" in frame


def _parcel(number: int) -> Any:
    return Parcel("a link", number, encode(Hello(model_id="policy", incarnation=1)))


@pytest.mark.usefixtures("in_an_actor")
def test_a_call_waits_for_earlier_calls_only_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_server, "PATIENCE_FOR_ORDER", 0.1)
    actor_server = ray_server.ActorServer("policy")
    scheme = RayWeightSyncScheme()
    scheme.init_on_worker("policy", model=small())
    actor_server = ray_server.actor_server_of("policy")
    try:
        assert actor_server.call(_parcel(0), ())
        with ThreadPoolExecutor(1) as thread, pytest.raises(ConnectionError, match="begun before"):
            thread.submit(actor_server.call, _parcel(2), ()).result(timeout=20.0)
        with pytest.raises(ConnectionError, match="no sender any more"):
            scheme.get_receiver().receive(timeout=0)
        assert scheme.get_receiver().state is State.UNINITIALIZED
    finally:
        scheme.close()
        ray_server._servers.clear()


@pytest.mark.usefixtures("in_an_actor")
def test_a_serial_actor_returns_a_call_that_overtook_an_earlier_one() -> None:
    """A serial actor cannot run the earlier call while it waits; with a key, a handshake may follow an update."""
    scheme = RayWeightSyncScheme()
    scheme.init_on_worker("policy", model=small())
    actor_server = ray_server.actor_server_of("policy")
    try:
        assert actor_server.call(_parcel(0), ())
        (frame,) = actor_server.call(_parcel(2), ())
        assert frame.startswith(EARLY)
    finally:
        scheme.close()
        ray_server._servers.clear()


@pytest.mark.usefixtures("in_an_actor")
def test_on_an_event_loop_a_call_that_overtook_others_is_returned_without_blocking() -> None:
    scheme = RayWeightSyncScheme()
    scheme.init_on_worker("policy", model=small())
    actor_server = ray_server.actor_server_of("policy")

    async def calls(*numbers: int) -> list[bytes]:
        answers = [actor_server.call(_parcel(number), ()) for number in numbers]
        return [frames[0][: len(EARLY)] for frames in answers]

    try:
        first, handshake, third = asyncio.run(calls(1, 0, 2))
        assert (first, third) == (UNKNOWN, EARLY)
        assert handshake not in (UNKNOWN, EARLY)
    finally:
        scheme.close()
        ray_server._servers.clear()


@pytest.mark.usefixtures("in_an_actor")
def test_a_link_without_a_model_is_rejected_although_another_call_adds_a_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a threaded actor, whose get_model may take long."""
    monkeypatch.setattr(ray_server, "_servers", {})

    class Serving(ray_server.ActorServer):
        @property
        def serves(self) -> bool:
            ray_server.actor_server_of(f"added beside {self.model_id}")
            return True

    ray_server._servers["critic"] = Serving("critic")

    frames = ray_server.actor_server_of("policy")._reject_link(_parcel(1), ModelPathError("no model"))

    (told,) = decoded(frames)
    assert "has a receiver of 'critic'" in told.reason


@pytest.mark.usefixtures("in_an_actor")
def test_a_protocol_error_on_one_link_fails_no_call_of_another() -> None:
    """In a threaded actor, each call reads all links."""
    scheme = RayWeightSyncScheme()
    scheme.init_on_worker("policy", model=small())
    actor_server = ray_server.actor_server_of("policy")
    try:
        assert actor_server.call(_parcel(0), ())
        no_layout = Update(model_id="policy", incarnation=1, version=1, layout_digest=b"", nbytes=0)
        bad = actor_server._call_server.submit(Parcel("a link", 1, encode(no_layout)))

        assert actor_server.call(replace(_parcel(0), link="another"), ())

        (told,) = decoded(bad.result(timeout=0))
        assert "has not carried" in told.reason
    finally:
        scheme.close()
        ray_server._servers.clear()


@pytest.mark.usefixtures("in_an_actor")
def test_a_handshake_that_another_call_has_answered_meanwhile_returns_that_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context, scheme = SimpleNamespace(), RayWeightSyncScheme()
    scheme.init_on_worker("policy", context=context)
    actor_server = ray_server.actor_server_of("policy")
    decide = actor_server._decide

    def overtaken(*given: Any) -> None:
        try:
            decide(*given)
        except ModelPathError:
            context.policy = small()
            scheme.get_receiver().receive(timeout=0)  # as a call in another thread would do
            raise

    monkeypatch.setattr(actor_server, "_decide", overtaken)
    try:
        (answer,) = decoded(actor_server.call(_parcel(0), ()))
        assert isinstance(answer, Hello)
    finally:
        scheme.close()
        ray_server._servers.clear()


class WithoutHooks(nn.Linear):
    """A module without hooks, like torch's ScriptModules."""

    def register_forward_pre_hook(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("register_forward_pre_hook is not supported on ScriptModules")


@pytest.mark.usefixtures("in_an_actor")
def test_a_module_without_hooks_is_warned_about_once_in_a_threaded_actor(caplog: pytest.LogCaptureFixture) -> None:
    scheme = RayWeightSyncScheme()
    scheme.init_on_worker("policy", model=WithoutHooks(2, 2))
    actor_server = ray_server.actor_server_of("policy")
    try:
        with ThreadPoolExecutor(1) as pool:
            for link in ("one", "another"):
                assert pool.submit(actor_server.call, replace(_parcel(0), link=link), ()).result()
        assert len([line for line in caplog.messages if "inside serving()" in line]) == 1
    finally:
        scheme.close()
        ray_server._servers.clear()


@pytest.mark.usefixtures("in_an_actor")
def test_lost_calls_are_not_waited_for() -> None:
    scheme = RayWeightSyncScheme()
    scheme.init_on_worker("policy", model=small())
    actor_server = ray_server.actor_server_of("policy")
    try:
        actor_server.call(_parcel(0), ())
        answer = actor_server._call_server.submit(_parcel(2))
        actor_server._call_server.skip(_parcel(2), (1,))
        assert not actor_server._call_server.awaits_turn(_parcel(2))
        assert not answer.done()
    finally:
        scheme.close()
        ray_server._servers.clear()


def _set_key_in_environment(_: Any, key: str | None) -> None:
    os.environ.pop("WEIGHTSYNC_KEY", None)
    if key is not None:
        os.environ["WEIGHTSYNC_KEY"] = key


def test_an_actor_with_a_key_accepts_weights_only_from_senders_with_that_key(setups: list[Any], trainer: Any) -> None:
    setup = setups[0]
    ray.get(setup.do.remote(_set_key_in_environment, "k"))
    try:
        sender = trainer([setup], small(1.0), key="k")
        assert sender.send(timeout=PATIENCE).version == 1
        with pytest.raises(WorkerLostError, match="another key"):
            trainer([setup], small(66.0), key="another").send(timeout=PATIENCE)
        with pytest.raises(WorkerLostError, match="has a key and this process has none"):
            trainer([setup], small(66.0)).send(timeout=PATIENCE)

        assert sender.send(small(2.0), timeout=PATIENCE).version == 2
        assert get(setup.shows.remote()) == {2.0}
    finally:
        ray.get(setup.do.remote(_set_key_in_environment, None))


def _set_weight_key(actor: Any, key: str | None) -> str:
    actor.weight_key = key
    return str(ray_server.own_actor())


def test_an_actor_reads_its_key_from_weight_key_and_a_transport_from_its_scheme(
    setups: list[Any], trainer: Any
) -> None:
    setup = setups[0]
    get(setup.do.remote(_set_weight_key, "k"))
    try:
        assert trainer([setup], small(1.0), key="k").send(timeout=PATIENCE).ok
        with pytest.raises(WorkerLostError, match="has a key and this process has none"):
            trainer([setup], small(66.0)).send(timeout=PATIENCE)
        for scheme in (RayWeightSyncScheme("tensordict", key="k"), RayModuleTransformScheme("tensordict", key="k")):
            transport = scheme.create_transport(setup)
            assert transport.send_weights("policy", small(2.0), timeout=PATIENCE).ok
            transport.close()
        with pytest.raises(WorkerLostError, match="another key"):
            RayWeightSyncScheme(key="another").create_transport(setup).send_weights("policy", small(66.0))

        assert get(setup.shows.remote()) == {2.0}
    finally:
        get(setup.do.remote(_set_weight_key, None))


def test_a_message_sealed_for_one_actor_is_rejected_by_another(setups: list[Any]) -> None:
    ours, other = get([setup.do.remote(_set_weight_key, "k") for setup in setups])
    try:
        seal = KeyedSeal(SharedKey("k"), Identity(TRANSPORT_NAME, "policy", ours, "a" * 32), "the actor")
        call = ("policy", "a" * 32, 0, seal.frame(0, Hello(model_id="policy", incarnation=1), None), None, ())
        assert (len(ours) > 8, ours != other) == (True, True)

        with pytest.raises(AuthenticationError, match="has another key"):
            seal.brought(get(setups[1]._weightsync_call.remote(*call)))
        with pytest.raises(Challenged):
            seal.brought(get(setups[0]._weightsync_call.remote(*call)))
    finally:
        get([setup.do.remote(_set_weight_key, None) for setup in setups])


@pytest.mark.usefixtures("in_an_actor")
def test_an_unauthenticated_call_takes_no_answer_of_a_link_and_skips_none_of_its_calls() -> None:
    scheme = RayWeightSyncScheme(key="k")
    scheme.init_on_worker("policy", context=SimpleNamespace())  # without a model yet: the handshake stays unanswered
    actor_server = ray_server.actor_server_of("policy")
    try:
        seal = KeyedSeal(
            SharedKey("k"), Identity(TRANSPORT_NAME, "policy", ray_server.own_actor(), "a link"), "the actor"
        )
        hello = Hello(model_id="policy", incarnation=1)
        with pytest.raises(Challenged):
            seal.brought(actor_server.call(Parcel("a link", 0, seal.frame(0, hello, None)), ()))
        assert actor_server.call(Parcel("a link", 0, seal.again(0)), ()) == []
        before = list(actor_server._unanswered)

        for frame in (encode(hello), b"WSYK" + bytes(60)):
            [refused] = actor_server.call(Parcel("a link", 1, frame), (1, 2, 3))
            assert refused[4] == EnvelopeKind.REFUSED
        assert before == list(actor_server._unanswered) == ["a link"]
        assert actor_server._call_server.awaits_turn(Parcel("a link", 1, b""))
    finally:
        scheme.close()
        ray_server._servers.clear()
