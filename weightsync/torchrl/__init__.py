"""TorchRL's other classes over this library: its transports and weight updaters, and support for its collectors."""
