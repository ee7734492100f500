"""The documented calls of names that both generations use for the same thing. Our signatures accept each of them.

Only that a call is accepted is tested with these; the tests of each class check what it does. Listed are the calls of
generation A, and other documented forms. `test_signatures.py` reads generation B's calls from TorchRL itself.
"""

from __future__ import annotations

from typing import Any, Final

Form = tuple[tuple[Any, ...], dict[str, Any]]

X: Final = object()


def given(*positional: Any, **keywords: Any) -> Form:
    """One call, as its positional and keyword arguments."""
    return positional, keywords


#: The calls of `create_transport` of any scheme in generation A.
A: Final = (given(X), given(pipe_or_context=X))

#: The transports, and the calls with which each sends and receives.
TRANSPORTS: Final = ("MPTransport", "SharedMemTransport", "RayTransport", "RPCTransport", "DistributedTransport")
SENT: Final = (given("policy", X), given(model_id="policy", weights=X), given(X), given(weights=X))
RECEIVED: Final = (given(), given(1.0), given(timeout=None), given(timeout=1.0, weights=X, model=X, strategy=X))

FORMS: Final[dict[str, tuple[Form, ...]]] = {
    "WeightSyncScheme.create_transport": A,
    "MultiProcessWeightSyncScheme.create_transport": (
        *A,
        given(),
        given(weight_queue=X, ack_queue=X, timeout=10.0),
        given(weight_queue=X),
    ),
    "SharedMemWeightSyncScheme.create_transport": (*A, given()),
    "NoWeightSyncScheme.create_transport": (*A, given()),
    "RayWeightSyncScheme.create_transport": (
        *A,
        given(),
        given(remote_actor=X, worker_idx=0),
        given(remote_collector=X),
    ),
    "RayModuleTransformScheme.create_transport": (
        *A,
        given(),
        given(remote_actor=X, worker_idx=0),
    ),
    "RPCWeightSyncScheme.create_transport": (
        *A,
        given(),
        given(X, X, X),
        given(collector_info=X, collector_rref=X, collector_class=X),
        given(collector_info=X, collector_rref=X, collector_class=X, worker_rank=1),
        given(worker_rank=1),
    ),
    "DistributedWeightSyncScheme.create_transport": (
        *A,
        given(),
        given(X, 1),
        given(store=X, rank=1),
        given(weights_buffer=X, store=X, rank=1, sync=True),
    ),
    # ------------------------------------------------------------------------------------------------- inits
    "WeightSyncScheme.init_on_sender": (
        given("policy"),
        given("policy", X),
        given(model_id="policy", context=X),
        given(model_id="policy", pipes=X, model=X),
        given(params_map=X),
        given(weights=X, devices=X),
        given(model=X, device_map_fn=X, num_workers=1, model_id="policy"),
    ),
    "WeightSyncScheme.init_on_worker": (
        given("policy"),
        given("policy", X),
        given(model_id="policy", pipe=X, model=X),
        given(model_id="policy", context=X),
    ),
    "WeightSyncScheme.prepare_weights": (given(X, "policy", "state_dict"), given(X, "policy", "state_dict", X)),
    "SharedMemWeightSyncScheme.__init__": (
        given(),
        given({}),
        given({}, "tensordict", False),
        given(policy_weights={}, strategy="tensordict", auto_register=True),
        given("state_dict"),
        given("state_dict", True, True),
        given(strategy="state_dict", sync=True, per_worker_weights=True),
    ),
    # -------------------------------------------------------------------------------------------- transports
    "MPTransport.__init__": (
        given(X),
        given(X, 5.0),
        given(X, timeout=5.0),
        given(pipe_connection=X, timeout=5.0),
        given(X, X, 5.0),
        given(weight_queue=X, ack_queue=X, timeout=5.0),
    ),
    "SharedMemTransport.__init__": (given(), given({}), given({}, False), given(policy_weights={}, auto_register=True)),
    "SharedMemTransport.register_weights": (
        given("policy", X),
        given(model_id="policy", weights=X),
        given(X, X, True),
        given(params_map=X, init_queues=X, per_worker=True),
        given(params_map=X),
    ),
    "RayTransport.__init__": (
        given(),
        given(X),
        given(X, "object_store"),
        given(remote_collector=X, tensor_transport="object_store"),
    ),
    "RayActorTransport.__init__": (
        given(),
        given(X, "tensordict"),
        given(actor_ref=X, update_method="state_dict", tensor_transport="object_store"),
    ),
    "RPCTransport.__init__": (
        given(),
        given(X, X, X),
        given(collector_info=X, collector_rref=X, collector_class=X),
    ),
    "DistributedTransport.__init__": (
        given(),
        given(X, 1),
        given(X, 1, True),
        given(store=X, rank=1, sync=False),
        given(weights_buffer=X, store=X, rank=1),
    ),
    **{f"{transport}.receive_weights": RECEIVED for transport in TRANSPORTS},
    **{f"{transport}.send_weights": SENT for transport in TRANSPORTS},
    **{f"{transport}.send_weights_async": SENT for transport in TRANSPORTS},
}
