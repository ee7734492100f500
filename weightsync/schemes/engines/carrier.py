"""A carrier transfers tensors to an engine's workers, separately from the calls that announce them."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from weightsync.errors import ConfigurationError, PartlyLoadedError, TransportError
from weightsync.schemes.engines.client import Bucket
from weightsync.schemes.peers.base import refuse_coroutines
from weightsync.weights.loader import is_unawaited
from weightsync.weights.tensors import DTYPE_NAMES

#: Seconds that a failed call waits for its carrier to give up.
_PATIENCE: Final = 5.0
#: The methods of a `Carrier`.
_METHODS: Final = ("init_info", "join", "update_info", "send", "done", "give_up")


class Carrier(abc.ABC):
    """Transfers tensors to an engine's workers, separately from the calls: the trainer's half, for example over NCCL.

    The calls announce the tensors, the carrier transfers them. Override the methods that your transfer needs.
    """

    def init_info(self) -> Mapping[str, Any]:
        """The information that the engine's workers need to join, such as a master's address and a world size.

        vLLM: the ``init_info`` of ``init_weight_transfer_engine``. SGLang: the body of the call of
        ``init_weights_update_group``.
        """
        return {}

    def join(self) -> None:
        """Join the workers' group. Runs while the engine's call to join is being answered."""
        return

    @abc.abstractmethod
    def update_info(self, bucket: Bucket) -> Mapping[str, Any]:
        """The fields of the call about a bucket in addition to names, dtypes and shapes."""

    def send(self, bucket: Bucket) -> None:
        """Send a bucket's tensors. Runs while the call that announces them is being answered."""
        return

    def done(self) -> None:
        """Free the resources of a version's calls: the last one has returned, or one has failed.

        An exception is logged, and changes no outcome.
        """
        return

    def give_up(self) -> None:
        """End a `join` or `send` in progress, from another thread: the engine is gone, or the link was closed."""
        return


def refuse_async_carrier(carrier: Carrier) -> None:
    """Refuse a carrier whose methods are ``async``: they are called in threads. Raises ConfigurationError."""
    refuse_coroutines(carrier, _METHODS, "Write them as plain functions that return when they are done.")


def described(bucket: Bucket, dtypes: str) -> dict[str, Any]:
    """Names, dtypes and shapes of a bucket, as engines expect them; ``dtypes`` is the engine's key for the dtypes."""
    return {
        "names": [name for name, _ in bucket],
        dtypes: [DTYPE_NAMES[tensor.dtype] for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
    }


def call_while_carrying(
    call: Callable[[], None],
    carry: Callable[[], Any],
    give_up: Callable[[], None],
    abort: Callable[[], None],
    what: str,
) -> None:
    """Make a call of the engine while the carrier does its part of it.

    Args:
        call: the call of the engine.
        carry: the carrier's part; runs in a thread of its own.
        give_up: ends ``carry``, if the call fails.
        abort: ends ``call``, if the carrier fails: otherwise the engine would wait for tensors that never come.
        what: the call's name, for messages.

    Raises:
        EngineError, TransportError: the call failed.
        PartlyLoadedError: the carrier failed.
        Exception: the call could not be made, for example of a body that is not JSON.
    """
    failures: list[BaseException] = []
    call_failed, lock = threading.Event(), threading.Lock()

    def run() -> None:
        try:
            if is_unawaited(carry()):
                raise ConfigurationError("it returned an awaitable, and nothing here awaits it.")
        except BaseException as error:  # noqa: BLE001 - whatever a carrier raises is reported to the sender
            with lock:
                if not call_failed.is_set():  # otherwise the engine's calls may belong to another link by now
                    failures.append(error)
                    abort()

    thread = threading.Thread(target=run, name=f"weightsync carries for {what}", daemon=True)
    thread.start()
    try:
        call()
    except BaseException as error:
        with lock:
            call_failed.set()
        give_up()
        thread.join(_PATIENCE)
        if failures and isinstance(error, TransportError):
            raise _carrier_error(failures[0], what) from failures[0]
        raise
    thread.join()
    if failures:
        raise _carrier_error(failures[0], what) from failures[0]


def _carrier_error(failure: BaseException, what: str) -> PartlyLoadedError:
    return PartlyLoadedError(f"Its carrier failed in {what}: {failure!r}")
