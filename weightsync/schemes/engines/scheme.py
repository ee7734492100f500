"""`EngineWeightSyncScheme`: workers are inference engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weightsync.errors import ConfigurationError
from weightsync.schemes.base import WeightSyncScheme
from weightsync.schemes.engines.client import Engine, EngineClient
from weightsync.schemes.sources import given_or_found
from weightsync.transports.base import Link
from weightsync.transports.calls.client import CallLink


class EngineWeightSyncScheme(WeightSyncScheme):
    """Workers are inference engines, each behind an `Engine` such as `VLLMEngine` or `SGLangEngine`.

    ``init_on_sender(engines=[...])`` takes one per worker; ``add_worker(worker_id, engine)`` adds another. There is no
    worker's side: an engine does not use weightsync. What the outcomes mean:

    - APPLIED (evidence ``call``): its calls returned.
    - REFUSED: it answered with an error before it began to change.
    - LOST: it cannot be reached, or failed later.
    - TIMED_OUT: it had not answered by the deadline.

    Args:
        strategy: "state_dict" or "tensordict", or a `WeightStrategy`.
        verify: see `WeightSyncScheme`; engines compare nothing.
        wire_dtype: see `WeightSyncScheme`: the dtype that the engine gets.
        delta: refused, since an engine takes whole tensors.

    Raises:
        ConfigurationError: an argument has an unknown value or another type, or ``delta=True``.
    """

    _sender_arguments = ("engines",)

    def _endpoints(self, keywords: Mapping[str, Any], context: Any, model_id: str) -> Mapping[int, Any]:
        """The engines, from ``engines=`` or the context's."""
        engines = given_or_found(keywords, context, "engines")
        if isinstance(engines, Engine):
            engines = [engines]
        if not isinstance(engines, Sequence) or not all(isinstance(each, Engine) for each in engines):
            raise ConfigurationError(
                f"init_on_sender() needs engines=, one Engine per worker: VLLMEngine(...), SGLangEngine(...) or your "
                f"own; it is {engines!r}."
            )
        return dict(enumerate(engines))

    def _endpoint(self, keywords: Mapping[str, Any], context: Any, model_id: str) -> Any:
        raise ConfigurationError(
            "An engine has no worker's side. To load weights in a process of yours that holds one, give another "
            "scheme's init_on_worker() loader=."
        )

    def create_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        """A link to an engine.

        Raises:
            ConfigurationError: it is not an `Engine`, or a method of it is ``async``.
        """
        if not isinstance(endpoint, Engine):
            raise ConfigurationError(f"{endpoint!r} is not an Engine: give a VLLMEngine, an SGLangEngine or your own.")
        client = EngineClient(endpoint, str(endpoint))
        return CallLink(client, str(endpoint), lambda: client.remark)

    def create_transport(self, pipe_or_context: Any = None) -> None:
        """None: calls of the engine carry the weights."""
        return
