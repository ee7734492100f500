"""Every documented form of TorchRL's calls: `create_transport`, underscored names, and older keywords."""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import pickle
from typing import Any

import pytest
import torch
from documented_forms import FORMS
from fleet import small
from tensordict import TensorDict

import weightsync
from weightsync import (
    ConfigurationError,
    DistributedTransport,
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    RPCTransport,
    RPCWeightSyncScheme,
    SharedMemTransport,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)


@pytest.mark.parametrize("name", FORMS)
def test_signatures_accept_each_documented_call(name: str) -> None:
    scheme, _, method = name.partition(".")
    signature = inspect.signature(getattr(getattr(weightsync, scheme), method))
    for positional, keywords in FORMS[name]:
        signature.bind(None, *positional, **keywords)


@pytest.mark.parametrize("scheme_class", [MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, NoWeightSyncScheme])
def test_model_id_none_means_policy(scheme_class: Any) -> None:
    """TorchRL's signatures have ``model_id: str | None = None`` together with weights and devices."""
    with scheme_class() as scheme:
        scheme.init_on_sender(model_id=None, weights={"a": torch.ones(1)}, devices=[torch.device("cpu")])

        assert scheme.model_id == "policy"


class Collector:
    def update_policy_weights_(self, policy_or_weights: Any) -> None: ...


RREF: Any = object()


@pytest.mark.parametrize(
    "form",
    [
        ((("w0", RREF, Collector),), {}),
        ((), {"pipe_or_context": ("w0", RREF, Collector)}),
        (("w0", RREF, Collector), {}),
        ((), {"collector_info": "w0", "collector_rref": RREF, "collector_class": Collector}),
        (("w0",), {"collector_rref": RREF, "collector_class": Collector}),
    ],
)
def test_an_rpc_transport_is_created_from_info_rref_and_class(form: Any) -> None:
    positional, keywords = form
    transport = RPCWeightSyncScheme().create_transport(*positional, **keywords)

    assert isinstance(transport, RPCTransport)
    collector = transport.collector
    assert (collector.worker, collector.rref, collector.kind) == ("w0", RREF, Collector)


def test_rpc_create_transport_refuses_other_tuples_and_duplicate_arguments() -> None:
    for wrong in (("w0", RREF), ("w0", RREF, Collector, 1)):
        with pytest.raises(ConfigurationError, match="collector_info, collector_rref, collector_class"):
            RPCWeightSyncScheme().create_transport(wrong)
    with pytest.raises(ConfigurationError, match="twice"):
        RPCWeightSyncScheme().create_transport("w0", collector_info="w1")


STORE: Any = object()


@pytest.mark.parametrize(
    "form",
    [
        (((STORE, 2),), {}),
        ((), {"pipe_or_context": (STORE, 2)}),
        ((STORE, 2), {}),
        ((), {"store": STORE, "rank": 2}),
        ((STORE,), {"rank": 2}),
        ((), {"weights_buffer": TensorDict(), "store": STORE, "rank": 2, "sync": True}),
    ],
)
def test_a_distributed_transport_is_created_from_store_and_rank(form: Any) -> None:
    positional, keywords = form
    transport = DistributedWeightSyncScheme().create_transport(*positional, **keywords)

    assert isinstance(transport, DistributedTransport)
    assert (transport.store, transport.rank, transport.sync) == (STORE, 2, True)


def test_distributed_create_transport_refuses_other_tuples_and_duplicate_arguments() -> None:
    with pytest.raises(ConfigurationError, match="store, rank"):
        DistributedWeightSyncScheme().create_transport((STORE, 2, 3))
    with pytest.raises(ConfigurationError, match="twice"):
        DistributedWeightSyncScheme().create_transport((STORE, 2), rank=1)


# ---------------------------------------------------------------------------------------- the underscored names


def test_a_scheme_shows_the_underscored_flags_read_only() -> None:
    ours, theirs = multiprocessing.Pipe()
    scheme, worker = MultiProcessWeightSyncScheme(), MultiProcessWeightSyncScheme()
    assert (scheme._initialized_on_sender, scheme._initialized_on_worker, scheme._initialized_on_receiver) == (
        False,
        False,
        False,
    )
    with scheme, worker:
        scheme.init_on_sender("policy", pipes=[ours], model=small())
        worker.init_on_worker("policy", pipe=theirs, model=small())

        assert (scheme._initialized_on_sender, scheme._initialized_on_worker) == (True, False)
        assert (worker._initialized_on_sender, worker._initialized_on_worker) == (False, True)
        assert worker._initialized_on_receiver is True
        with pytest.raises(AttributeError):
            scheme._initialized_on_sender = False  # type: ignore[misc]
        for copied in (pickle.loads(pickle.dumps(scheme)), copy.copy(scheme), scheme._copy_uninitialized()):
            assert type(copied) is type(scheme)
            assert copied is not scheme
            assert copied._initialized_on_sender is False
        assert scheme._initialized_on_sender is True


def test_from_backend_raises_value_error_for_an_unknown_backend() -> None:
    with pytest.raises(ValueError, match=r"Unsupported weight-sync backend 'carrier pigeon'.*shared"):
        WeightSyncScheme.from_backend("carrier pigeon")


# ------------------------------------------------------------------------------------------- older keywords


def test_receivers_accept_the_older_keywords() -> None:
    ours, theirs = multiprocessing.Pipe()
    scheme, model = MultiProcessWeightSyncScheme(), small()
    for verb in ("register_model", "_register_model"):
        with scheme.create_receiver() as receiver:
            getattr(receiver, verb)(model_ref=model)
            assert receiver.model is model
            getattr(receiver, verb)(model=small())
            assert receiver.model is not model
    with scheme.create_sender() as sender, scheme.create_receiver() as receiver:
        sender._register_worker(worker_idx=0, pipe_or_context=ours)
        receiver._register_model(model_ref=model)
        receiver._register_worker_transport(pipe=theirs)
        sender.send_async(small(3.0))

        assert receiver.receive(timeout=0)
        assert sender.wait_async().ok


def test_a_receiver_needs_exactly_one_model_and_one_transport() -> None:
    with MultiProcessWeightSyncScheme().create_receiver() as receiver:
        with pytest.raises(ConfigurationError, match="model"):
            receiver.register_model(small(), model_ref=small())
        with pytest.raises(ConfigurationError, match="model"):
            receiver.register_model()
        with pytest.raises(ConfigurationError, match="given no pipe"):
            receiver.register_worker_transport()
        with pytest.raises(ConfigurationError, match="pipe"):
            receiver.register_worker_transport("one", pipe="two")


# -------------------------------------------------------------------------------------------- shared memory


@pytest.mark.parametrize("auto_register", [True, False])
def test_auto_register_is_a_readable_property(auto_register: bool) -> None:
    assert SharedMemWeightSyncScheme(auto_register=auto_register).auto_register is auto_register
    assert SharedMemTransport(auto_register=auto_register).auto_register is auto_register
    assert SharedMemWeightSyncScheme("state_dict").auto_register is True


@pytest.mark.parametrize("value", ["no", 0, None])
def test_auto_register_must_be_a_bool(value: Any) -> None:
    for make in (SharedMemWeightSyncScheme, SharedMemTransport):
        with pytest.raises(ConfigurationError, match=r"^auto_register="):
            make(auto_register=value)


@pytest.mark.parametrize("value", [small(), 3, TensorDict({"weight": torch.zeros(2)}), {"weight": torch.zeros(2)}])
def test_policy_weights_must_be_a_dict_from_model_ids_to_weights(value: Any) -> None:
    for make in (SharedMemWeightSyncScheme, SharedMemTransport):
        with pytest.raises(ConfigurationError, match=r"^policy_weights= is .*give a dict that maps a model's id"):
            make(value)


def test_register_shared_weights_refuses_a_wrong_model_id_or_wrong_weights() -> None:
    scheme = SharedMemWeightSyncScheme()
    with pytest.raises(ConfigurationError, match=r"^model_id= is 3"):
        scheme.register_shared_weights(3, {"weight": torch.zeros(2)})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"was given weights of type generator: give a TensorDict or a dict"):
        scheme.register_shared_weights("policy", small().parameters())

    assert scheme.policy_weights == {}


def test_auto_register_may_be_turned_off_later() -> None:
    scheme = SharedMemWeightSyncScheme()
    scheme.auto_register = False

    with pytest.raises(KeyError, match="policy"):
        scheme.prepare_weights({"weight": torch.ones(2)}, "policy", scheme.strategy)


def test_a_params_map_can_be_registered_without_queues() -> None:
    transport, buffers = SharedMemTransport(), {worker: TensorDict({"weight": torch.zeros(2)}) for worker in (0, 1)}
    transport.register_weights(params_map=buffers)
    transport.send_weights({"weight": torch.ones(2)})

    assert [buffers[worker]["weight"].sum().item() for worker in (0, 1)] == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="register_weights"):
        transport.setup_connection_and_weights_on_sender()
