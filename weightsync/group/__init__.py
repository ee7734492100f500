"""A worker group: starts workers that act with the model, and gives the trainer their results."""
