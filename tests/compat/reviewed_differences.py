"""How our signatures differ from TorchRL's own of generation B, reviewed here and nowhere else.

`test_signatures.py` fails on a difference that is not listed, and on an entry that is no longer needed. It fails, too,
if an entry of `DIFFERENCES` no longer reads as it was reviewed. Keywords that only we have may come and go.
"""
# ruff: noqa: E501 - a signature is one line

from __future__ import annotations

from typing import Final

REASONS: Final = {
    "A/B": "both generations call this class by one name: what is given says which is meant (docs/migrating.md)",
    "default": "the generations' default strategies differ, ours is A's; or an argument of A's stands before B's",
    "set": "said once, at init, and shown here; who would set it gives another argument to init or connect",
    "name": "the subclasses that TorchRL ships, and its users', call this argument so",
    "Ray": "TorchRL moves weights beside Ray, by a process group that these set up; ours moves them through Ray",
}

#: Keyword-only arguments were added, and nothing else: timeout=, on_failure= and the like.
ADDED: Final = (
    "WeightSyncScheme.connect",
    "WeightSyncScheme.send",
    "RayTransport.setup_connection_and_weights_on_receiver",
    "RayTransport.wait_ack",
    "RPCTransport.__init__",
    "RPCTransport.wait_ack",
    "DistributedTransport.wait_ack",
    "WeightUpdaterBase.push_weights",
    "NoWeightSyncScheme.connect",
    "RayModuleTransformScheme.__init__",
)

#: How ours reads, without the keywords that only we have (``...``: not given), and why it differs.
DIFFERENCES: Final[dict[str, tuple[str, str]]] = {
    "WeightSyncScheme.__init__": ("(self, strategy='state_dict')", "default"),
    "WeightSyncScheme.create_transport": ("(self, pipe_or_context)", "A/B"),
    "WeightSyncScheme.init_on_sender": ("(self, model_id='policy', context=None, **kwargs)", "A/B"),
    "WeightSyncScheme.model_id": ("property", "set"),
    "WeightSyncScheme.shared_transport": ("property", "set"),
    "WeightSyncScheme.strategy": ("property", "set"),
    "WeightSyncScheme.synchronized_on_receiver": ("property", "set"),
    "WeightSyncScheme.synchronized_on_sender": ("property", "set"),
    "WeightSyncScheme.weights": ("property", "set"),
    "MPTransport.__init__": ("(self, pipe_connection=None, ack_queue=None, timeout=10.0, *, weight_queue=None)", "A/B"),
    "MPTransport.receive_weights": ("(self, timeout=..., *, weights=None, model=None, strategy=None)", "A/B"),
    "MPTransport.send_weights_async": ("(self, model_id=..., weights=...)", "A/B"),
    "SharedMemTransport.__init__": ("(self, policy_weights=None, auto_register=True)", "A/B"),
    "SharedMemTransport.receive_weights": ("(self, timeout=..., *, weights=None, model=None, strategy=None)", "A/B"),
    "SharedMemTransport.register_weights": ("(self, model_id, weights=None, per_worker=False, **given)", "A/B"),
    "SharedMemTransport.send_weights": ("(self, model_id=..., weights=..., worker_ids=None)", "A/B"),
    "RayTransport.__init__": (
        "(self, remote_collector=None, tensor_transport='object_store', *, remote_actor=None, worker_idx=None, backend=None, connection_info_name=None, model_id=None)",
        "A/B",
    ),
    "RayTransport.receive_weights": ("(self, timeout=..., *, weights=None, model=None, strategy=None)", "A/B"),
    "RayTransport.send_weights": ("(self, model_id=..., weights=...)", "A/B"),
    "RayTransport.send_weights_async": ("(self, model_id=..., weights=...)", "A/B"),
    "RPCTransport.receive_weights": ("(self, timeout=..., *, weights=None, model=None, strategy=None)", "A/B"),
    "RPCTransport.send_weights": ("(self, model_id=..., weights=...)", "A/B"),
    "RPCTransport.send_weights_async": ("(self, model_id=..., weights=...)", "A/B"),
    "DistributedTransport.__init__": ("(self, store=None, rank=None, sync=True, *, weights_buffer=...)", "A/B"),
    "DistributedTransport.receive_weights": ("(self, timeout=..., *, weights=None, model=None, strategy=None)", "A/B"),
    "DistributedTransport.send_weights": ("(self, model_id=..., weights=...)", "A/B"),
    "DistributedTransport.send_weights_async": ("(self, model_id=..., weights=...)", "A/B"),
    "WeightUpdaterBase._maybe_map_weights": ("(self, server_weights)", "name"),
    "SharedMemWeightSyncScheme.__init__": (
        "(self, policy_weights=None, strategy='tensordict', auto_register=True, *, sync=True, per_worker_weights=False)",
        "default",
    ),
    "SharedMemWeightSyncScheme.create_transport": ("(self, pipe_or_context=None, *, **queues)", "A/B"),
    "NoWeightSyncScheme.create_transport": ("(self, pipe_or_context=None)", "A/B"),
    "RayWeightSyncScheme.__init__": ("(self, strategy='state_dict', backend='gloo')", "default"),
    "RayWeightSyncScheme.create_transport": (
        "(self, pipe_or_context=None, *, remote_collector=None, remote_actor=None, worker_idx=None)",
        "A/B",
    ),
    "RPCWeightSyncScheme.create_transport": (
        "(self, pipe_or_context=None, *, collector_info=None, collector_rref=None, collector_class=None, worker_rank=None)",
        "A/B",
    ),
    "DistributedWeightSyncScheme.__init__": (
        "(self, backend='gloo', sync=True, timeout=3600.0, strategy='state_dict')",
        "default",
    ),
    "DistributedWeightSyncScheme.create_transport": ("(self, store=None, rank=None)", "A/B"),
    "TransportBackend.receive_weights": ("(self, timeout=1.0)", "A/B"),
    "TransportBackend.send_weights": ("(self, model_id, weights)", "A/B"),
    "MultiProcessWeightSyncScheme.__init__": ("(self, strategy='state_dict', sync=True)", "default"),
}

#: What TorchRL has and we do not, and why.
MISSING: Final[dict[str, str]] = {
    "RayTransport.set_model": "Ray",
    "RayTransport.set_model_version": "Ray",
    "RayTransport.set_process_group": "Ray",
    "RayWeightSyncScheme.connection_info_name": "Ray",
}
