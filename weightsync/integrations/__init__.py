"""The former home of `weightsync.torchrl`."""
