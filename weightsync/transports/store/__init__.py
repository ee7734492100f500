"""Links over a TCPStore and private process groups of two ranks."""

from weightsync.transports.store.announcing import sender_link
from weightsync.transports.store.link import StoreLink
from weightsync.transports.store.listener import listen
from weightsync.transports.store.store import StoreEnd

__all__ = ["StoreEnd", "StoreLink", "listen", "sender_link"]
