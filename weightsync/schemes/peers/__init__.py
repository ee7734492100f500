"""Peers without a weightsync receiver: TorchRL's collectors, plain Ray actors, user-written transports."""
