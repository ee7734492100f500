"""Links as drivers use them: whatever an adapter raises is the end of its link, and of nothing else."""

from __future__ import annotations

import logging

from weightsync.errors import ProtocolError, TransportError
from weightsync.transports.base import Link, Received

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


def _fault(link: Link, error: Exception) -> AdapterFault:
    logger.error("the adapter of the link to %s failed", link.peer, exc_info=error)
    return AdapterFault(f"the adapter of the link to {link.peer} failed: {error!r}")
