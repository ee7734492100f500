"""Links whose ends find each other in a TCPStore."""

from weightsync.transports.store.announcing import sender_link
from weightsync.transports.store.link import StoreLink
from weightsync.transports.store.listener import listen
from weightsync.transports.store.store import StoreEndpoint

__all__ = ["StoreEndpoint", "StoreLink", "listen", "sender_link"]
