"""TorchRL's other classes over this library: its transports and weight updaters, and what its collectors ask for."""
