"""Links as drivers use them: whatever an adapter raises is the end of its link, and of nothing else."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from weightsync.errors import ProtocolError, TransportError
from weightsync.messages import Hello
from weightsync.transports.base import Link, Received, WaitFailed, Waker, wait
from weightsync.transports.liveness import own_host

logger = logging.getLogger("weightsync")


class AdapterFault(TransportError):
    """An adapter raised what its contract does not name: its link is given up, but may still carry a last word."""


def read(link: Link) -> list[Received]:
    """What has arrived: see `Link.receive`.

    Raises:
        TransportError, ProtocolError: as `Link.receive`.
        AdapterFault: it raised anything else.
    """
    try:
        return link.receive()
    except (TransportError, ProtocolError):
        raise
    except Exception as error:
        raise _fault(link, error) from error


def flush(link: Link) -> bool:
    """Write what waits to be written: see `Link.flush`.

    Raises:
        TransportError: as `Link.flush`.
        AdapterFault: it raised anything else.
    """
    try:
        return link.flush()
    except TransportError:
        raise
    except Exception as error:
        raise _fault(link, error) from error


def watch(link: Link, hello: Hello) -> None:
    """Notice the death of the process that said ``hello``, if it runs on this host: see `Link.watch`.

    Raises:
        TransportError: it cannot be watched.
        AdapterFault: it raised anything else.
    """
    if hello.host != own_host():
        return
    try:
        link.watch(hello.pid, hello.started)
    except TransportError:
        raise
    except Exception as error:
        raise _fault(link, error) from error


def close(link: Link) -> None:
    """Give a link up, whatever its adapter raises: see `Link.close`."""
    try:
        link.close()
    except Exception as error:  # noqa: BLE001 - nothing more is asked of this link; the others go on
        _fault(link, error)


def waited(waker: Waker, links: Sequence[Link], timeout: float | None, since: int) -> tuple[Link, str] | None:
    """Wait for links: see `weightsync.transports.base.wait`; the one whose adapter failed, if any, and the reason."""
    try:
        wait(waker, links, timeout, since)
    except WaitFailed as failed:
        link, cause = links[failed.which], failed.__cause__
        assert isinstance(cause, Exception)
        return link, str(_fault(link, cause))
    return None


def mishandled(link: Link, error: Exception) -> str:
    """Log what handling a message of that link raised, against all expectation; the reason for which it is lost."""
    logger.error("a message over the link to %s could not be handled", link.peer, exc_info=error)
    return f"a message from {link.peer} could not be handled: {error!r}"


def _fault(link: Link, error: Exception) -> AdapterFault:
    logger.error("the adapter of the link to %s failed", link.peer, exc_info=error)
    return AdapterFault(f"the adapter of the link to {link.peer} failed: {error!r}")
