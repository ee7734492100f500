"""vLLM through a shared directory, by TorchRL's names: the trainer writes versions, the engine's side reads the newest.

Each version has a directory of its own. A small file names the newest version, and is replaced once that version is
complete, so a reader never sees a version that is being written. The two newest versions are kept; a reader that is
slower than that looks again, or fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from weightsync.clock import Deadline
from weightsync.engine.context import MISSING, optional
from weightsync.errors import ConfigurationError, LayoutError
from weightsync.schemes.base import WeightSyncScheme
from weightsync.schemes.engines.vllm import require_reset
from weightsync.torchrl.llm.senders import EngineSender, at_least_one
from weightsync.transports.process import PerProcess
from weightsync.transports.ray.session import require_ray
from weightsync.weights.strategy import WeightStrategy
from weightsync.weights.tensors import DTYPES

#: The file that names the newest version.
_NEWEST: Final = "newest"
#: The dtypes that `TensorDict.load_memmap` knows.
_READABLE: Final = {dtype for name, dtype in DTYPES.items() if not name.startswith("float8")}
#: What `_newest_and_time` finds in an empty directory.
_NO_VERSION: Final = 0, 0
#: Seconds between two checks for a newer version.
_STEP: Final = 0.02


class _Turn(PerProcess):
    """Held by the thread that writes a version: otherwise two could write into the directory of one version."""

    #: The descriptors of directories that this process has locked.
    locked: frozenset[int] = frozenset()

    def _begin(self) -> None:
        self.lock = threading.RLock()
        for descriptor in self.locked:  # of the parent, whose lock a child would keep for longer than its parent lives
            os.close(descriptor)
        self.locked = frozenset()


_turn: Final = _Turn()


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory, if its file system has locks. Raises ConfigurationError: another process has it."""
    descriptor = os.open(directory, os.O_RDONLY)
    _turn.locked |= {descriptor}
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigurationError(
                "another process, or a call that a signal handler has interrupted, is writing a version into "
                f"{directory}: give each trainer a directory of its own, and of several ranks let one write. Nothing "
                "was written."
            ) from error
        except OSError:  # some network file systems have no locks
            pass
        yield
    finally:
        if descriptor in _turn.locked:  # not in a child that was forked meanwhile
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that is being forked has the descriptor too
            _turn.locked -= {descriptor}
            os.close(descriptor)


def _folder(path_like: object, argument: str) -> str:
    """The path of a directory. Raises ConfigurationError: it is not one."""
    path = os.fspath(path_like) if isinstance(path_like, str | os.PathLike) else None
    if not path or not isinstance(path, str):
        raise ConfigurationError(f"{argument}= is {path_like!r}: give the path of the shared directory.")
    return path


class VLLMDoubleBufferTransport:
    """Writes versions into a directory, and reads the newest.

    Args:
        remote_addr: the directory, as the sender sees it.
        local_addr: the same directory, as the receiver sees it; default: ``remote_addr``.
        num_threads: threads with which the engine's workers read.
    """

    def __init__(
        self,
        remote_addr: str | os.PathLike[str],
        local_addr: str | os.PathLike[str] | None = None,
        num_threads: int = 1,
    ) -> None:
        self.remote_addr = _folder(remote_addr, "remote_addr")
        self.local_addr = self.remote_addr if local_addr is None else _folder(local_addr, "local_addr")
        self.num_threads = at_least_one(num_threads, "num_threads")

    def send_weights(self, model_id: str, weights: Any) -> None:
        """Write a version, and make it the newest once it is complete. It may not be applied yet when this returns.

        Args:
            model_id: the model; it is not written.
            weights: a module, a TensorDict or a dict.

        Raises:
            ConfigurationError: these are not weights, or another process is writing into the directory.
            LayoutError: a tensor has a dtype that readers cannot load. Nothing was written.
            OSError: the directory cannot be written. The newest version stays the same.
        """
        tensordict: TensorDict = WeightStrategy("tensordict").extract_weights(weights)
        _refuse_unreadable(tensordict)
        directory = Path(self.remote_addr)
        directory.mkdir(parents=True, exist_ok=True)
        with _turn.lock, _locked(directory):
            previous = newest(directory)
            version = previous + 1
            shutil.rmtree(directory / str(version), ignore_errors=True)  # left by a trainer that died while it wrote
            tensordict.memmap(directory / str(version), copy_existing=True)  # its threads would outlive the call
            name_file = directory / f"{_NEWEST}.{version}"
            name_file.write_text(str(version), encoding="utf-8")
            name_file.replace(directory / _NEWEST)
            shutil.rmtree(directory / str(previous - 1), ignore_errors=True)

    def receive_weights(
        self, timeout: float | None = None, *, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> TensorDictBase | None:
        """The newest version, complete, by dotted names, in memory of its own, or None.

        Args:
            timeout: ignored, as are the other arguments: this never waits.
        """
        return read(Path(self.local_addr))[1]

    def check_connection(self) -> bool:
        """Whether the directory exists or can be made."""
        return Path(self.remote_addr).is_dir() or Path(self.remote_addr).parent.is_dir()


def _refuse_unreadable(weights: TensorDict) -> None:
    """Refuse tensors that `TensorDict.load_memmap` could not load."""
    for name, tensor in weights.flatten_keys(".").items():
        if isinstance(tensor, Tensor) and tensor.dtype not in _READABLE:
            why = f"has dtype {str(tensor.dtype).removeprefix('torch.')}, which TensorDict.load_memmap() cannot load"
            raise LayoutError(
                f"'{name}' {why} for a reader of the directory: convert it, to bfloat16 for example, or view it as "
                "uint8. Nothing was written.",
                mismatched={name: why},
            )


def newest(directory: Path) -> int:
    """The number of the newest version; 0 if there is none."""
    try:
        return int((directory / _NEWEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return 0


def _newest_and_time(directory: Path) -> tuple[int, int]:
    """The number of the newest version, and when it was named: in a directory that was emptied, numbers start again."""
    try:
        named = (directory / _NEWEST).stat().st_mtime_ns
    except FileNotFoundError:
        return _NO_VERSION
    return newest(directory), named


def read(directory: Path) -> tuple[int, TensorDictBase | None]:
    """Read the newest version, and its number. If it is removed during the read, there is a newer one: read that."""
    while (version := newest(directory)) != 0:
        try:
            weights = TensorDict.load_memmap(directory / str(version)).flatten_keys(".").clone()
        except (FileNotFoundError, NotADirectoryError):
            if newest(directory) == version:
                raise
            continue
        if newest(directory) - version < 2:
            return version, weights
    return 0, None


class VLLMDoubleBufferSyncScheme(WeightSyncScheme):
    """Weights go through a shared directory, which the engine's side polls.

    The trainer gets no outcome: `VLLMDoubleBufferWeightSender.update_weights` returns when a version is written.

    Args:
        remote_addr: the directory, as the sender sees it.
        local_addr: the same directory, as the receiver sees it; default: ``remote_addr``.
        num_threads: threads with which the engine's workers read.
        strategy: "tensordict" (default) or "state_dict".
    """

    def __init__(
        self,
        remote_addr: str | os.PathLike[str],
        local_addr: str | os.PathLike[str] | None = None,
        num_threads: int = 1,
        strategy: WeightStrategy | str = "tensordict",
    ) -> None:
        self.remote_addr = _folder(remote_addr, "remote_addr")
        self.local_addr = self.remote_addr if local_addr is None else _folder(local_addr, "local_addr")
        self.num_threads = at_least_one(num_threads, "num_threads")
        super().__init__(strategy)

    def create_transport(self, *_: Any, **__: Any) -> VLLMDoubleBufferTransport:
        """A transport over the directory."""
        return VLLMDoubleBufferTransport(self.remote_addr, self.local_addr, self.num_threads)

    def create_sender(self) -> VLLMDoubleBufferWeightSender:  # type: ignore[override]
        """A sender that writes versions."""
        return VLLMDoubleBufferWeightSender(self)

    def create_receiver(self, vllm_engine: Any) -> VLLMDoubleBufferWeightReceiver:  # type: ignore[override]
        """A receiver that reads versions and loads them into an engine."""
        return VLLMDoubleBufferWeightReceiver(self, vllm_engine)


class VLLMDoubleBufferWeightSender:
    """Writes a model's weights.

    Args:
        scheme: the scheme that made it.
    """

    def __init__(self, scheme: VLLMDoubleBufferSyncScheme) -> None:
        self._sender = _DirectorySender(scheme)

    def register_model(self, model: Any) -> None:
        """Write this model's weights when `update_weights` is given none. It is held weakly.

        Raises:
            ConfigurationError: it cannot be held weakly: None, or a dict.
        """
        self._sender.register_model(model)

    def update_weights(self, weights: Any = None) -> None:
        """Write a version: see `VLLMDoubleBufferTransport.send_weights`.

        Raises:
            ConfigurationError: there are no weights: no model was registered, or it was garbage-collected.
        """
        self._sender.update_weights(weights)


class _DirectorySender(EngineSender):
    def __init__(self, scheme: VLLMDoubleBufferSyncScheme) -> None:
        super().__init__(scheme)
        self._transport = scheme.create_transport()


class VLLMDoubleBufferWeightReceiver:
    """Reads versions, and loads them into a vLLM engine.

    Args:
        scheme: the scheme that made it.
        vllm_engine: an engine with ``collective_rpc``, whose workers have TorchRL's ``load_weights_from_storage``; or
            an ``LLM`` in this process, whose model's ``load_weights`` is called.
    """

    def __init__(self, scheme: VLLMDoubleBufferSyncScheme, vllm_engine: Any) -> None:
        self._scheme = scheme
        self._engine = vllm_engine
        self._applied = _NO_VERSION

    def apply_weights(self, weights: TensorDictBase, inplace: bool = True) -> None:
        """Load weights into the engine in this process, and reset its prefix cache.

        Raises:
            ConfigurationError: (a ValueError) ``inplace`` is false.
            EngineError: the prefix cache was not reset, because requests hold parts of it.
            Exception: what the engine raised.
        """
        if not inplace:
            raise ConfigurationError("inplace=False: an engine loads weights in place only. Leave inplace= out.")
        engine = optional(self._engine, "llm_engine")
        inner = self._engine if engine is MISSING else engine
        model = inner.model_executor.driver_worker.model_runner.model
        model.load_weights(list(weights.items()))
        self._reset_cache()

    def poll_and_apply(self, timeout: float = 180.0) -> bool:
        """Load the newest version, if it is newer than the one loaded last.

        Args:
            timeout: seconds to wait for one.

        Returns:
            Whether one was loaded.

        Raises:
            EngineError: the prefix cache was not reset, because requests hold parts of it. The version does not count
                as loaded: the next call loads it again.
        """
        deadline, at = Deadline(timeout), Path(self._scheme.local_addr)
        while (found := _newest_and_time(at)) in (_NO_VERSION, self._applied) or not self._load(at, found):
            if deadline.passed:
                return False
            threading.Event().wait(min(_STEP, deadline.nap or _STEP))
        return True

    def _load(self, directory: Path, latest: tuple[int, int]) -> bool:
        """Load the newest version; False: the directory was emptied meanwhile."""
        rpc = optional(self._engine, "collective_rpc")
        if rpc is MISSING:
            version, weights = read(directory)
            if weights is None:
                return False
            self.apply_weights(weights)
            self._applied = latest if version == latest[0] else (version, 0)  # a newer one is loaded again
            return True
        is_whole = False
        while not is_whole:  # if a version is removed during the load, workers load only what they still find
            latest = _newest_and_time(directory)
            if (version := latest[0]) == 0:
                return False
            results = rpc(
                method="load_weights_from_storage", args=(str(directory / str(version)), self._scheme.num_threads)
            )
            if optional(self._engine, "llm_engine") is MISSING:
                require_ray("VLLMDoubleBufferWeightReceiver").get(results)
            is_whole = newest(directory) - version < 2
        self._reset_cache()
        self._applied = latest
        return True

    def _reset_cache(self) -> None:
        reset = optional(self._engine, "reset_prefix_cache")
        if reset is not MISSING:
            name = f"the vLLM engine {type(self._engine).__name__}"
            require_reset(
                reset(), name, "Its new weights do not count as loaded: let its requests end, and load again."
            )
