"""A destination that is not a model: a function that loads the weights into an inference engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weightsync.errors import ConfigurationError, LayoutError, PartlyLoadedError
from weightsync.options import whole_number
from weightsync.weights.device.base import DeviceMemory, on_host
from weightsync.weights.layout import ALIGNMENT, Entry, Layout, listed, quoted
from weightsync.weights.packing import views
from weightsync.weights.relay import AnyLayoutTarget
from weightsync.weights.target import Mode, Staged, SwapBroken
from weightsync.weights.tensors import address_of, borrowed, owning

#: Called with names and tensors, and the version.
Load = Callable[[Iterator[tuple[str, Tensor]], int], Any]

#: How many bytes of weights are copied at a time, where they have to be copied.
BUCKET_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Loader:
    """Loads each version into something that is not a model: ``init_on_worker(..., model=Loader(load))``.

    ``init_on_worker(..., loader=load)`` is the same.

    Args:
        load: called as ``load(weights, version)`` in the thread that receives, once the version has arrived whole and
            was verified. ``weights`` yields each name with its tensor, on the CPU. The ack is sent after ``load`` has
            read all of them and returned. If ``load`` raises, the version is refused, and the engine must still serve
            the previous one. If it does not, raise `PartlyLoadedError`. A tensor is valid until ``load`` returns: clone
            what you keep.
        name_map: maps names in the trainer's weights to the engine's names; other names are unchanged.
        bucket_bytes: tensors are views of what arrived. Where that cannot be viewed (read-only or unaligned memory, or
            memory that is kept for the next delta), they are copied in buckets of this size, or of one larger tensor.

    Raises:
        ConfigurationError: an argument is of another type, or ``load`` is ``async``.
    """

    load: Load
    name_map: Mapping[str, str] | None = None
    bucket_bytes: int = BUCKET_BYTES

    def __post_init__(self) -> None:
        if not callable(self.load):
            raise ConfigurationError(
                f"loader= is {self.load!r}: give a function that is called as loader(weights, version)."
            )
        if inspect.iscoroutinefunction(self.load):
            raise ConfigurationError(
                f"loader= is {self.load!r}, which is async: it is called in a thread without an event loop, where "
                "nothing would run. Give a function that returns once all is loaded."
            )
        require_names(self.name_map)
        require_bucket_bytes(self.bucket_bytes)


class LoaderTarget(AnyLayoutTarget):
    """A target whose swap is a call of the user's loader, which cannot be undone.

    Args:
        loader: the user's.
        version: the version that is being applied.
    """

    destination: Loader
    _REFUSAL = (
        "A loader takes tensors, but the weights have the extra state of {}. Send weights without it: a state dict "
        "from which you took the _extra_state entries."
    )

    def __init__(self, loader: Loader, version: Callable[[], int]) -> None:
        super().__init__({}, Mode.COPY)
        self.destination = loader
        self._version = version

    @property
    def layout(self) -> Layout:
        """Not known: the loader alone knows what the engine takes.

        Raises:
            ConfigurationError: always.
        """
        raise _unreadable_error()

    def stage(
        self, layout: Layout, payload: memoryview | DeviceMemory, extras: bytes = b"", in_slot: bool = False
    ) -> Staged:
        """Check that an update is complete, and that its names fit the mapping: see `Target.stage`.

        Raises:
            LayoutError: it has extra state; or the mapping names a tensor that is not there, or gives two one name.
            ProtocolError: payload or extras do not match the layout.
        """
        staged = super().stage(layout, payload, extras, in_slot)
        renamed(layout, self.destination.name_map)
        return staged

    def swap(self, staged: Staged) -> None:
        """Call the loader.

        Raises:
            LayoutError: it returned without taking any tensor; nothing was loaded.
            SwapBroken: it said that it had begun to change the engine, or returned without taking all tensors, or
                something to be awaited, or raised something other than an Exception.
            Exception: what it raised; the engine serves what it did.
        """
        loader, layout = self.destination, staged.layout
        weights = _CountedWeights(draw(layout, staged.payload, loader.name_map, loader.bucket_bytes))
        try:
            returned = loader.load(weights, self._version())
        except PartlyLoadedError as error:
            raise SwapBroken(f"The loader had begun to change the engine: {error}") from error
        except Exception as error:
            weights.annotate(error, len(layout.entries))
            raise
        except BaseException as error:
            raise SwapBroken(f"The loader was interrupted: {error!r}.") from error
        finally:
            weights.end()
        _require_loaded(weights.count, len(layout.entries), returned)

    def apply(self, weights: object) -> None:  # noqa: ARG002 - an override
        """Applying weights manually is not supported.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "This worker has a loader instead of a model: to load weights of your own, call the loader yourself."
        )

    def digest(self, layout: Layout | None = None) -> bytes:  # noqa: ARG002 - an override
        """What the engine holds cannot be read back.

        Raises:
            ConfigurationError: always.
        """
        raise _unreadable_error()


def _require_loaded(taken: int, offered: int, returned: object) -> None:
    """Check that a loader has loaded all, when it has returned."""
    pending = is_unawaited(returned)
    if offered and not taken:
        raise LayoutError(
            f"The loader returned without taking any of the {offered} tensors: nothing was loaded. "
            "It must iterate over all of its first argument before it returns."
        )
    if pending:
        raise SwapBroken(
            f"The loader returned a {type(returned).__name__}, which nothing awaits here: it must return once all is "
            "loaded."
        )
    if taken < offered:
        raise SwapBroken(f"The loader returned after {taken} of {offered} tensors.")


def is_unawaited(result: Any) -> bool:
    """Whether a call of user code returned an awaitable, so that its work has perhaps not been done."""
    return has_not_run(result) or inspect.isawaitable(result) or isinstance(result, Future)


def has_not_run(result: Any) -> bool:
    """Whether a call of user code returned a coroutine: nothing of an ``async`` function has run."""
    found = inspect.iscoroutine(result)
    if found:
        result.close()  # it says nothing when it is collected
    return found


def _unreadable_error() -> ConfigurationError:
    return ConfigurationError(
        "This worker has a loader instead of a model: the weights that its engine holds cannot be read here."
    )


class _CountedWeights(Iterator[tuple[str, Tensor]]):
    """The iterator that a loader gets. It counts what was taken, and ends for good when the loader has returned."""

    def __init__(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self._weights = weights
        self.count = 0

    def __next__(self) -> tuple[str, Tensor]:
        found = next(self._weights)
        self.count += 1
        return found

    def annotate(self, error: Exception, offered: int) -> None:
        """Have the traceback of a loader's exception say what the loader would have to raise if it had begun.

        Args:
            error: what the loader raised.
            offered: how many tensors there were.
        """
        if self.count:
            error.add_note(
                f"The loader had taken {self.count} of {offered} tensors. If it had begun to change the engine, it has "
                "to raise PartlyLoadedError: any other says that the previous version is still served."
            )

    def end(self) -> None:
        """Yield nothing more."""
        self._weights = iter(())


def require_names(names: Any) -> None:
    """Raise ConfigurationError: this is not a mapping of names to names."""
    if names is None:
        return
    if not isinstance(names, Mapping) or not all(isinstance(name, str) for pair in names.items() for name in pair):
        raise ConfigurationError(f"name_map= is {names!r}: give a mapping of the trainer's names to the engine's.")


def require_bucket_bytes(nbytes: Any) -> None:
    """Raise ConfigurationError: this is not a number of bytes, 1 or more."""
    if not whole_number(nbytes):
        raise ConfigurationError(f"bucket_bytes= is {nbytes!r}: give a number of bytes as an int, 1 or more.")


def renamed(layout: Layout, names: Mapping[str, str] | None) -> list[str]:
    """The engine's name of each entry of a layout.

    Raises:
        LayoutError: the mapping names tensors that are not there, or two tensors would have one name.
    """
    if not names:
        return [entry.name for entry in layout.entries]
    unknown = sorted(names.keys() - {entry.name for entry in layout.entries})
    if unknown:
        raise LayoutError(
            f"name_map= maps {listed([quoted(name) for name in unknown])}, but the weights have no such tensors: "
            f"{layout.summary()}.",
            missing=unknown,
        )
    found = [names.get(entry.name, entry.name) for entry in layout.entries]
    twice = sorted({name for name in found if found.count(name) > 1}) if len(set(found)) < len(found) else []
    if twice:
        raise LayoutError(f"name_map= gives several tensors the name {listed([quoted(name) for name in twice])}.")
    return found


def buckets(layout: Layout, nbytes: int) -> Iterator[tuple[int, int]]:
    """Split entries into runs of one dtype, of at most `nbytes` bytes or of one larger entry: ``first, last``."""
    for group in layout.groups:
        first = group.first
        for index in range(group.first, group.last):
            if first < index and _end(layout.entries[index]) - layout.entries[first].offset > nbytes:
                yield first, index
                first = index
        yield first, group.last


def _end(entry: Entry) -> int:
    return entry.offset + entry.nbytes


def draw(
    layout: Layout, payload: memoryview | DeviceMemory, names: Mapping[str, str] | None, bucket_bytes: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and contiguous tensors of a payload: views where it can be viewed, else copies of a bucket at a time.

    The views keep its memory alive; it may be overwritten once the version has been answered.
    """
    host, engine_names = on_host(payload, layout.nbytes), renamed(layout, names)
    viewable = not host.readonly and address_of(host) % ALIGNMENT == 0
    flat = borrowed(address_of(host), layout.nbytes)
    for first, last in buckets(layout, bucket_bytes):
        start, end = layout.entries[first].offset, _end(layout.entries[last - 1])
        # A storage for each bucket: `torch.save` refuses tensors of several dtypes in one.
        piece = owning(host, start, end - start) if viewable else flat[start:end].clone()
        yield from zip(engine_names[first:last], map(Tensor.contiguous, views(layout, piece, first, last)), strict=True)
