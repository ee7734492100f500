"""The former home of `weightsync.protocol.messages`."""

import warnings

from weightsync.protocol.messages import Ack as Ack
from weightsync.protocol.messages import Bye as Bye
from weightsync.protocol.messages import Ending as Ending
from weightsync.protocol.messages import Hello as Hello
from weightsync.protocol.messages import Message as Message
from weightsync.protocol.messages import Refusal as Refusal
from weightsync.protocol.messages import SlotRef as SlotRef
from weightsync.protocol.messages import Update as Update
from weightsync.protocol.messages import WeightsForm as WeightsForm

warnings.warn(
    "weightsync.messages is now weightsync.protocol.messages: import from there.", DeprecationWarning, stacklevel=2
)
