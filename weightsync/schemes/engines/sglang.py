"""`SGLangEngine`: updates an SGLang server through its HTTP routes."""

from __future__ import annotations

import base64
import logging
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from weightsync.errors import ConfigurationError, EngineError
from weightsync.options import Option, switch, whole_number
from weightsync.schemes.engines.carrier import Carrier, call_while_carrying, described, refuse_async_carrier
from weightsync.schemes.engines.client import Bucket, Engine
from weightsync.schemes.engines.http import HttpCalls
from weightsync.schemes.engines.phases import Loading, Phases
from weightsync.weights.loader import BUCKET_BYTES, require_bucket_bytes, require_names

#: The ``group_name`` of the group that a carrier and SGLang's workers join, unless its `init_info` has another.
GROUP: Final = "weight_update_group"
#: The status by which SGLang says that it did not flush its prefix cache: it has requests.
_NOT_IDLE: Final = 400

logger = logging.getLogger("weightsync")


class SGLangPause(Option):
    """What SGLang does with requests in progress while weights change: its own ``mode`` of ``pause_generation``."""

    #: They are ended.
    ABORT = "abort"
    #: They wait, and begin again with the new weights.
    RETRACT = "retract"
    #: They wait, and continue with the new weights from what the old ones have computed.
    IN_PLACE = "in_place"


class SGLangEngine(Engine):
    """An SGLang server, updated by ``update_weights_from_tensor``: the calls contain the tensors.

    With a carrier it is updated by ``update_weights_from_distributed``, after one ``init_weights_update_group``: the
    carrier transfers the tensors, for example by an NCCL broadcast.

    For each version: ``pause_generation``, an update call for each bucket, ``flush_cache``, ``continue_generation``. If
    an update call fails, the server may hold parts of two versions: it stays paused, and the worker is LOST. If the
    pause fails, the server is resumed. After LOST, reload the server's model, then call `add_worker`.

    The prefix cache holds what old weights have computed for prompts, and SGLang flushes it only while it has no
    requests. With ``pause="abort"`` it has none, and must flush. Otherwise requests that wait can prevent it: then the
    version counts as applied, a warning is logged, and new requests may use parts of the cache.

    Args:
        url: the URL of the server.
        carrier: transfers the tensors; None: the calls contain them.
        tp_size: its tensor-parallel size: each rank gets the whole tensors, and takes its part.
        pause: what happens to requests in progress: "retract" (default), "abort" or "in_place"; None: do not pause,
            so that a request may see parts of two versions.
        flush_cache: whether to flush the prefix cache.
        name_map: the engine's name of a tensor, by its name in the trainer's weights.
        bucket_bytes: how many bytes go in one call, for all ranks together. The call takes about three times as many.
        headers: sent with each call, such as an ``Authorization``.

    Raises:
        ConfigurationError: an argument is unusable.
    """

    def __init__(
        self,
        url: str,
        carrier: Carrier | None = None,
        *,
        tp_size: int = 1,
        pause: SGLangPause | str | None = SGLangPause.RETRACT,
        flush_cache: bool = True,
        name_map: Mapping[str, str] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        ranks = whole_number(tp_size)
        if not ranks:
            raise ConfigurationError(f"tp_size= is {tp_size!r}: give the number of ranks as an int, 1 or more.")
        if carrier is not None:
            if not isinstance(carrier, Carrier):
                raise ConfigurationError(f"{carrier!r} is not a Carrier: give the object that moves its tensors.")
            refuse_async_carrier(carrier)
        require_names(name_map)
        require_bucket_bytes(bucket_bytes)
        self._calls = HttpCalls(url, headers)
        self._carrier = carrier
        self._joined = carrier is None
        self._tp_size = ranks
        self._pause = None if pause is None else SGLangPause(pause)
        self._flushes = switch(flush_cache, "flush_cache")
        self.name_map = name_map
        # The call has the tensors once for each rank.
        self.bucket_bytes = bucket_bytes if carrier is not None else max(bucket_bytes // ranks, 1)

    def load(self, buckets: Iterable[Bucket], version: str) -> None:
        """Load a version: see `Engine.load`."""
        Loading(_Version(self, version), str(self)).run(buckets)

    def open(self) -> None:
        """Become usable, also again after `abort`: see `Engine.open`."""
        self._joined = self._carrier is None
        self._calls.open()

    def abort(self) -> None:
        """End the call in progress: see `Engine.abort`."""
        self._calls.abort()
        if self._carrier is not None:
            self._carrier.give_up()

    def __str__(self) -> str:
        return f"the SGLang server at {self._calls.url}"

    @property
    def awaited(self) -> str:
        """The call that has not been answered yet: see `Engine.awaited`."""
        return self._calls.awaited


class _Version(Phases):
    """The calls that carry one version to an SGLang server."""

    def __init__(self, engine: SGLangEngine, version: str) -> None:
        self._engine, self._version = engine, version
        self._calls, self._carrier = engine._calls, engine._carrier
        self.pauses = engine._pause is not None

    def join(self) -> None:
        carrier = self._carrier
        if carrier is None or self._engine._joined:
            return
        self._call_with_carrier(
            "init_weights_update_group", {"group_name": GROUP, **carrier.init_info()}, carrier, carrier.join
        )
        self._engine._joined = True

    def pause(self) -> None:
        if self._engine._pause is not None:
            self._calls.command("pause_generation", {"mode": self._engine._pause.value})

    def change(self, buckets: Iterable[Bucket], on_begin: Callable[[], None]) -> None:
        for bucket in buckets:
            self._update(bucket)
            on_begin()

    def _update(self, bucket: Bucket) -> None:
        carrier, common = self._carrier, {"flush_cache": False, "weight_version": self._version}
        if carrier is not None:
            body = {**described(bucket, "dtypes"), "group_name": GROUP, **common, **carrier.update_info(bucket)}
            self._call_with_carrier("update_weights_from_distributed", body, carrier, lambda: carrier.send(bucket))
            return
        # A view would be pickled with all of its storage.
        owned = [(name, tensor.clone()) for name, tensor in bucket]
        serialized = base64.b64encode(pickle.dumps(owned)).decode()
        everywhere = [serialized] * self._engine._tp_size
        self._require_success("update_weights_from_tensor", {"serialized_named_tensors": everywhere, **common})

    def _call_with_carrier(
        self, route: str, body: Mapping[str, Any], carrier: Carrier, carry: Callable[[], None]
    ) -> None:
        call_while_carrying(
            lambda: self._require_success(route, body), carry, carrier.give_up, self._calls.abort, route
        )

    def _require_success(self, route: str, body: Mapping[str, Any]) -> None:
        answer = self._calls.command(route, body)
        if not isinstance(answer, Mapping) or answer.get("success") is not True:
            raise EngineError(f"POST {self._calls.url}/{route} was answered {answer}.")

    def settle(self) -> None:
        if not self._engine._flushes:
            return
        try:
            self._calls.post("flush_cache")
        except EngineError as error:
            if self._engine._pause is SGLangPause.ABORT or error.status != _NOT_IDLE:
                raise
            logger.warning(
                "%s has requests, so it did not flush its prefix cache: new requests may use what the old weights have "
                "computed. pause='abort' ends its requests.",
                self._engine,
            )

    def resume(self) -> None:
        if self.pauses:
            self._calls.command("continue_generation")

    def resume_if_closed(self) -> bool:
        return self.pauses and self._calls.command_if_aborted("continue_generation")

    def done(self) -> None:
        if self._carrier is not None:
            self._carrier.done()
