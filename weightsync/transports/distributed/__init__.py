"""Links over a TCPStore and private process groups of two ranks."""

from weightsync.transports.distributed.announcing import sender_link
from weightsync.transports.distributed.link import StoreLink
from weightsync.transports.distributed.listening import listen
from weightsync.transports.distributed.store import StoreEnd

__all__ = ["StoreEnd", "StoreLink", "listen", "sender_link"]
