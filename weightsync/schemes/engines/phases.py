"""The phases in which vLLM and SGLang load a version, and the state of an engine if one of them fails."""

from __future__ import annotations

import abc
import enum
import logging
from collections.abc import Callable, Iterable

from weightsync.errors import EngineError, PartlyLoadedError, TransportError, reason_of
from weightsync.schemes.engines.client import Bucket, EngineInDoubtError
from weightsync.schemes.engines.http import UnreachedError

logger = logging.getLogger("weightsync")


class Phases(abc.ABC):
    """The calls that carry one version. Each raises EngineError, TransportError or PartlyLoadedError if it fails."""

    #: Whether the engine is paused during the update.
    pauses: bool

    @abc.abstractmethod
    def join(self) -> None:
        """Join the engine's group. Called once, before the first version."""

    @abc.abstractmethod
    def pause(self) -> None:
        """Pause the engine, if this phase applies to it."""

    @abc.abstractmethod
    def change(self, buckets: Iterable[Bucket], begun: Callable[[], None]) -> None:
        """Send the version. Calls ``begun`` once the engine has accepted the first call that may change it."""

    @abc.abstractmethod
    def settle(self) -> None:
        """What must be done when the whole version is loaded, before the engine resumes."""

    @abc.abstractmethod
    def resume(self) -> None:
        """Resume the engine, if it was paused."""

    @abc.abstractmethod
    def resume_if_closed(self) -> bool:
        """If the link was closed, resume the engine if it was paused. Returns whether it confirmed that."""

    @abc.abstractmethod
    def done(self) -> None:
        """Free the resources of the version's calls."""


class _Stage(enum.Enum):
    """How far a version has come."""

    JOINING = enum.auto()
    PAUSING = enum.auto()
    #: The engine has not yet received, or not yet accepted, a call that changes it.
    BEGINNING = enum.auto()
    CHANGING = enum.auto()
    LOADED = enum.auto()
    #: The link was closed while the engine was being paused, and the engine has resumed.
    RESUMED = enum.auto()


class Loading:
    """Takes an engine through the phases of one version.

    Args:
        phases: its calls.
        name: the engine's, for messages.
    """

    def __init__(self, phases: Phases, name: str) -> None:
        self._phases = phases
        self._name = name
        self._stage = _Stage.JOINING

    def run(self, buckets: Iterable[Bucket]) -> None:
        """Load a version.

        Raises:
            EngineInDoubtError: it failed, and the engine may have changed, may still be paused, or cannot be reached.
            Exception: it failed, and the engine continues with the previous version.
        """
        phases = self._phases
        try:
            phases.join()
            self._stage = _Stage.PAUSING
            phases.pause()
            self._stage = _Stage.BEGINNING
            phases.change(buckets, self._mark_changing)
            self._stage = _Stage.LOADED
            phases.settle()
            phases.resume()
        except (TransportError, PartlyLoadedError) as error:
            if self._stage is _Stage.PAUSING and phases.resume_if_closed():
                self._stage = _Stage.RESUMED
            raise self._in_doubt_error(error) from error
        except Exception as error:
            if not self._is_as_before(error):
                raise self._in_doubt_error(error) from error
            if self._may_be_paused(error):
                self._resume_after_failure(error)
            raise
        finally:
            self._free()

    def _free(self) -> None:
        """Free what carried the version. A failure is logged: it changes nothing of what the engine serves by now."""
        try:
            self._phases.done()
        except Exception:
            logger.warning("%s: done() of the carrier of a version raised", self._name, exc_info=True)

    def _mark_changing(self) -> None:
        self._stage = _Stage.CHANGING

    def _is_as_before(self, error: Exception) -> bool:
        """Whether the engine certainly still has its previous weights."""
        if self._stage is _Stage.BEGINNING:  # any other error occurs before the call
            return not isinstance(error, EngineError) or error.began_nothing
        return self._stage in (_Stage.JOINING, _Stage.PAUSING)

    def _may_be_paused(self, error: Exception) -> bool:
        if not self._phases.pauses or self._stage is _Stage.JOINING:
            return False
        turned_away = isinstance(error, EngineError) and error.began_nothing
        return self._stage is not _Stage.PAUSING or not turned_away

    def _resume_after_failure(self, error: Exception) -> None:
        """Let the engine resume with the previous version."""
        try:
            self._phases.resume()
        except (EngineError, TransportError) as paused:
            raise EngineInDoubtError(
                f"{self._name} did not load the version, and may be paused: it did not confirm that it resumed. "
                f"{error} {paused}"
            ) from error

    def _in_doubt_error(self, error: Exception) -> EngineInDoubtError:
        state = self._describe_state(error)
        if isinstance(error, TransportError):
            return EngineInDoubtError(f"{error} If {self._name} still runs, it {state}.")
        return EngineInDoubtError(f"{self._name} {state}: {reason_of(error)}")

    def _describe_state(self, error: Exception) -> str:
        paused = "stays paused" if self._phases.pauses else "was not paused"
        if self._stage is _Stage.LOADED:
            resumes = "but did not confirm that it resumed, and may be paused"
            return f"has loaded the version, {resumes if self._phases.pauses else 'and was not paused'}"
        if self._stage is _Stage.CHANGING:
            return f"may hold parts of two versions, and {paused}"
        unreached = isinstance(error, UnreachedError)
        if self._stage is _Stage.BEGINNING:
            return f"{'has the weights that it had' if unreached else 'may hold parts of two versions'}, and {paused}"
        if self._stage is _Stage.PAUSING and not unreached:
            return "has the weights that it had, and may be paused"
        if self._stage is _Stage.RESUMED:
            return "has the weights that it had, and has resumed"
        return "has the weights that it had"
