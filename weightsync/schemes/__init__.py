"""Schemes: one model across all workers, in TorchRL's names, wired over one kind of transport each."""
