"""TorchRL's transport classes as facades: each is a sender or a receiver behind TorchRL's methods."""
