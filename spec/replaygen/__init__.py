"""The parts of `spec/replay.py`: graphs of the model, with the needs of each step, and the paths that cover them."""
