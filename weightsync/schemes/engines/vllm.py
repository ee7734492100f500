"""`VLLMEngine`: drives the four phases of vLLM's weight transfer, through its HTTP routes or a handle."""

from __future__ import annotations

import base64
import logging
import pickle
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from weightsync.engine.context import MISSING, optional
from weightsync.errors import ConfigurationError, EngineError, TransportError
from weightsync.options import Option
from weightsync.schemes.engines.carrier import Carrier, call_while_carrying, described, refuse_async_carrier
from weightsync.schemes.engines.client import Bucket, Engine
from weightsync.schemes.engines.http import HttpCalls, NotDoneError
from weightsync.schemes.engines.phases import Loading, Phases
from weightsync.schemes.peers.base import refuse_coroutines
from weightsync.transports.ray.session import require_ray
from weightsync.weights.loader import BUCKET_BYTES, is_unawaited, require_bucket_bytes, require_names

#: Seconds between two checks of a Ray call, so that `abort` is noticed.
_STEP: Final = 0.1

logger = logging.getLogger("weightsync")


class VLLMPause(Option):
    """What vLLM does with requests in progress while weights change: the ``mode`` of its ``/pause``."""

    #: They wait, and continue with the new weights from what the old ones have computed.
    KEEP = "keep"
    #: They are ended.
    ABORT = "abort"
    #: They are finished first; new ones wait.
    WAIT = "wait"


class _HttpControl:
    """Calls the routes of a vLLM server."""

    def __init__(self, calls: HttpCalls, pause: VLLMPause | None) -> None:
        self._calls = calls
        self._pause = pause
        self.name = f"the vLLM server at {calls.url}"
        self.pauses = pause is not None

    @property
    def awaited(self) -> str:
        """The call that was not answered yet."""
        return self._calls.awaited

    def phase(self, phase: str, body: Mapping[str, Any]) -> None:
        self._calls.command(phase, _json_body(body) if phase == "update_weights" else body)

    def pause(self) -> None:
        if self._pause is not None:
            self._calls.command(f"pause?mode={self._pause.value}")

    def reset_cache(self) -> None:
        if self._pause not in (None, VLLMPause.KEEP):
            return  # the pause has done so
        try:
            self._calls.command(_RESET)
        except NotDoneError:  # vLLM says so since 0.26
            logger.warning(
                "%s has requests that hold parts of its prefix cache, so it did not reset it: new requests may use "
                "what the old weights have computed. pause='abort' and pause='wait' empty it.",
                self.name,
            )

    def resume(self) -> None:
        if self._pause is not None:
            self._calls.command("resume")

    def resume_if_closed(self) -> bool:
        return self._pause is not None and self._calls.command_if_aborted("resume")

    def open(self) -> None:
        self._calls.open()

    def abort(self) -> None:
        self._calls.abort()


class _HandleControl:
    """Calls the methods of an object in this process, or of a Ray actor."""

    #: The phases that take a request; the others are called without arguments.
    _WITH_REQUEST: Final = frozenset({"init_weight_transfer_engine", "update_weights"})

    def __init__(self, handle: Any) -> None:
        missing = [name for name in _PHASES if optional(handle, name) is MISSING]
        if missing:
            raise ConfigurationError(
                f"{handle!r} has no {', '.join(missing)}: give a vLLM engine, a Ray actor that holds one, or a URL."
            )
        refuse_coroutines(
            handle, (*_PHASES, _RESET), "Give the URL of the engine's server, or a Ray actor that holds the engine."
        )
        self._handle = handle
        self._aborted = threading.Event()
        self.pauses = False
        #: The call that was not answered yet.
        self.awaited = ""
        self.name = f"the vLLM engine {type(handle).__name__}"

    def phase(self, phase: str, body: Mapping[str, Any]) -> None:
        self._call(phase, body)

    def _call(self, phase: str, body: Mapping[str, Any]) -> Any:
        method = getattr(self._handle, phase)
        remote = optional(method, "remote")
        arguments = (dict(body),) if phase in self._WITH_REQUEST else ()
        if self._aborted.is_set():
            raise TransportError(f"{phase}() of {self.name}: the link was closed.")
        self.awaited = f"{phase}()"
        try:
            result = method(*arguments) if remote is MISSING else self._wait_for_result(remote(*arguments), phase)
        except (TransportError, EngineError):
            raise
        except Exception as error:
            raise EngineError(f"{phase}() of {self.name} raised {type(error).__name__}: {error}") from error
        finally:
            self.awaited = ""
        if is_unawaited(result):
            raise EngineError(
                f"{phase}() of {self.name} returned a {type(result).__name__}, which nothing awaits here: give the URL "
                "of its server, or a Ray actor that holds it."
            )
        return result

    def _wait_for_result(self, reference: Any, phase: str) -> Any:
        ray = require_ray("VLLMEngine")
        while not ray.wait([reference], timeout=_STEP)[0]:
            if self._aborted.is_set():
                raise TransportError(f"{phase}() of {self.name} got no answer: the link was closed.")
        try:
            return ray.get(reference)
        except ray.exceptions.RayActorError as error:
            raise TransportError(f"{phase}() of {self.name}: {error}") from error

    def pause(self) -> None:
        """An engine that is called directly runs one call at a time."""

    def reset_cache(self) -> None:
        if optional(self._handle, _RESET) is not MISSING:
            require_reset(self._call(_RESET, {}), self.name, "Let its requests end before a version is sent.")

    def resume(self) -> None:
        """Like `pause`."""

    def resume_if_closed(self) -> bool:
        """It was not paused."""
        return False

    def open(self) -> None:
        self._aborted = threading.Event()

    def abort(self) -> None:
        self._aborted.set()


def _json_body(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body as HTTP carries it: JSON has no form for memory handles, so vLLM takes them pickled."""
    info = dict(body["update_info"])
    if "ipc_handles" in info:
        info["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(info.pop("ipc_handles"))).decode()
    return {**body, "update_info": info}


def require_reset(answer: Any, name: str, advice: str) -> None:
    """Raise EngineError: vLLM says that it did not reset its prefix cache. Older releases of it return None."""
    if answer is False:
        raise EngineError(
            f"{_RESET}() of {name} returned False: requests hold parts of the prefix cache, and new requests may use "
            f"what the old weights have computed. {advice}"
        )


#: vLLM's prefix cache is keyed by tokens alone, whatever weights computed its entries.
_RESET: Final = "reset_prefix_cache"
_PHASES: Final = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")


class VLLMEngine(Engine):
    """A vLLM engine, driven through the four phases of its weight transfer API.

    Once: ``init_weight_transfer_engine``. For each version: pause, ``start_weight_update``, ``update_weights`` for each
    bucket, ``finish_weight_update``, ``reset_prefix_cache``, resume. If one of these fails after the update was
    started, the engine may hold parts of two versions: it stays paused, and the worker is LOST. If the pause fails, the
    engine is resumed. A server needs ``VLLM_SERVER_DEV_MODE=1`` and a ``--weight-transfer-config``.

    The prefix cache holds what old weights have computed for prompts. A server's pause by "abort" or "wait" empties it,
    otherwise ``reset_prefix_cache`` does, unless a request still holds a part of it. Then a server's version counts as
    applied, and a warning is logged if the server says so (since vLLM 0.26). An object or actor whose method then
    returns False is LOST; one without that method is left as it is.

    Args:
        engine: the URL of a server; or an object with these four methods, such as an ``LLM``, or a Ray actor. An object
            or actor is not paused: make sure that it does not generate during an update. An object whose methods are
            ``async``, such as an ``AsyncLLM``, is refused: give the URL of its server, or a Ray actor that holds it.
        carrier: transfers the tensors: the trainer's half of the server's backend.
        pause: what happens to a server's requests in progress: "keep" (default), "abort" or "wait"; None: do not
            pause, so that a request may see parts of two versions.
        name_map: the engine's name of a tensor, by its name in the trainer's weights.
        bucket_bytes: how many bytes go in one ``update_weights``.
        headers: sent with each HTTP call, such as an ``Authorization``.

    Raises:
        ConfigurationError: an argument is unusable, or a method of the handle or the carrier is ``async``.
    """

    def __init__(
        self,
        engine: Any,
        carrier: Carrier,
        *,
        pause: VLLMPause | str | None = VLLMPause.KEEP,
        name_map: Mapping[str, str] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not isinstance(carrier, Carrier):
            raise ConfigurationError(f"{carrier!r} is not a Carrier: give the object that moves its tensors.")
        refuse_async_carrier(carrier)
        require_names(name_map)
        require_bucket_bytes(bucket_bytes)
        mode = None if pause is None else VLLMPause(pause)
        at_url = isinstance(engine, str)
        self._control = _HttpControl(HttpCalls(engine, headers), mode) if at_url else _HandleControl(engine)
        self._carrier = carrier
        self._initialised = False
        self.name_map = name_map
        self.bucket_bytes = bucket_bytes

    def load(self, buckets: Iterable[Bucket], version: str) -> None:
        """Load a version: see `Engine.load`."""
        Loading(_Version(self, version), str(self)).run(buckets)

    def open(self) -> None:
        """Become usable, also again after `abort`: see `Engine.open`."""
        self._initialised = False
        self._control.open()

    def abort(self) -> None:
        """End the call in progress: see `Engine.abort`."""
        self._control.abort()
        self._carrier.give_up()

    def __str__(self) -> str:
        return self._control.name

    @property
    def awaited(self) -> str:
        """The call that has not been answered yet: see `Engine.awaited`."""
        return self._control.awaited

    def _call_with_carrier(self, phase: str, request: Mapping[str, Any], carry: Callable[[], None]) -> None:
        control = self._control
        call_while_carrying(lambda: control.phase(phase, request), carry, self._carrier.give_up, control.abort, phase)


class _Version(Phases):
    """The calls that carry one version to a vLLM engine."""

    def __init__(self, engine: VLLMEngine, version: str) -> None:
        self._engine, self._version = engine, version
        self._control, self._carrier = engine._control, engine._carrier
        self.pauses = engine._control.pauses

    def join(self) -> None:
        if not self._engine._initialised:
            request = {"init_info": dict(self._carrier.init_info())}
            self._engine._call_with_carrier("init_weight_transfer_engine", request, self._carrier.join)
            self._engine._initialised = True

    def pause(self) -> None:
        self._control.pause()

    def change(self, buckets: Iterable[Bucket], on_begin: Callable[[], None]) -> None:
        self._control.phase("start_weight_update", {"is_checkpoint_format": True})
        on_begin()
        for bucket in buckets:
            self._update(bucket)
        self._control.phase("finish_weight_update", {"weight_version": self._version})

    def _update(self, bucket: Bucket) -> None:
        description = described(bucket, "dtype_names")
        request = {"update_info": {**description, **self._carrier.update_info(bucket)}}
        self._engine._call_with_carrier("update_weights", request, lambda: self._carrier.send(bucket))

    def settle(self) -> None:
        self._control.reset_cache()

    def resume(self) -> None:
        self._control.resume()

    def resume_if_closed(self) -> bool:
        return self._control.resume_if_closed()

    def done(self) -> None:
        self._carrier.done()
