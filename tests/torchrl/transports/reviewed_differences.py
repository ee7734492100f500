"""How our signatures differ from TorchRL's own of generation B, reviewed here and nowhere else.

Where both generations call one thing by one name there is nothing to review: each call of either is made
(`documented_forms.py`). `test_signatures.py` fails on any other difference that is not listed, and on an entry that is no longer needed. It fails, too,
if an entry of `DIFFERENCES` no longer reads as it was reviewed. Keywords that only we have may come and go.
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
