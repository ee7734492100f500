"""Workers and transports without a receiver of ours: TorchRL's collectors, Ray actors, transports of the user's own."""
