"""What `spec/replay.py` renders: graphs of the model with what each step asks of an adapter, and their covers."""
