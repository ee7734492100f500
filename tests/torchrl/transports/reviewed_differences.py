"""The reviewed differences between our signatures and those of TorchRL's generation B.

Names that both generations use for the same thing are not listed, since a test makes each documented call of either
(`documented_forms.py`). `test_signatures.py` fails on any other difference that is not listed, on an entry that is no
longer needed, and on an entry of `DIFFERENCES` that no longer equals our signature. Keywords that only we have may
change.
"""
# ruff: noqa: E501 - a signature is one line

from __future__ import annotations

from typing import Final

REASONS: Final = {
    "A/B": "a protocol: users write it for one generation or the other, and ours calls it in the way that it is written",
    "default": "the generations' default strategies differ, ours is A's; or an argument of A's stands before B's",
    "set": "said once, at init, and shown here; who would set it gives another argument to init or connect",
    "name": "the subclasses that TorchRL ships, and its users', call this argument so",
}

#: Members of ours that differ only by additional keyword-only arguments, such as timeout= and on_failure=.
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

#: Our signature, without the keywords that only we have (``...``: not given), and the reason why it differs.
DIFFERENCES: Final[dict[str, tuple[str, str]]] = {
    "WeightSyncScheme.__init__": ("(self, strategy='state_dict')", "default"),
    "WeightSyncScheme.model_id": ("property", "set"),
    "WeightSyncScheme.shared_transport": ("property", "set"),
    "WeightSyncScheme.strategy": ("property", "set"),
    "WeightSyncScheme.synchronized_on_receiver": ("property", "set"),
    "WeightSyncScheme.synchronized_on_sender": ("property", "set"),
    "WeightSyncScheme.weights": ("property", "set"),
    "WeightUpdaterBase._maybe_map_weights": ("(self, server_weights)", "name"),
    "RayWeightSyncScheme.__init__": ("(self, strategy='state_dict', backend='gloo')", "default"),
    "RPCWeightSyncScheme.__init__": ("(self, strategy='state_dict')", "default"),
    "DistributedWeightSyncScheme.__init__": (
        "(self, backend='gloo', sync=True, timeout=3600.0, strategy='state_dict')",
        "default",
    ),
    "TransportBackend.receive_weights": ("(self, timeout=1.0, *, weights=None, model=None, strategy=None)", "A/B"),
    "TransportBackend.send_weights": ("(self, model_id, weights)", "A/B"),
    "MultiProcessWeightSyncScheme.__init__": ("(self, strategy='state_dict', sync=True)", "default"),
}
