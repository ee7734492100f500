"""TorchRL's transport classes as facades: a sender or a receiver with one link behind the old verbs."""
