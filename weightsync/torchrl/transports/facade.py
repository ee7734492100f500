"""TorchRL's transport classes over the machines: what they all offer."""

from __future__ import annotations

from weightsync.torchrl.transports.receiving import ReceivingHalf
from weightsync.torchrl.transports.sending import SendingHalf


class TransportFacade(SendingHalf, ReceivingHalf):
    """What all of TorchRL's transport classes offer; each lays its own links.

    A subclass overrides `_lay_link` to send, `_listen` to receive, `_endpoints` if it may not know whom it reaches,
    and `check_connection`. See `weightsync.torchrl.transports.foundation.Foundation` for the arguments.
    """
