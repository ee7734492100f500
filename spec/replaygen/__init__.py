"""The parts of `spec/replay.py`: graphs of the model with what each step needs of a transport, and their covers."""
