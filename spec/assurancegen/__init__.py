"""The parts of `spec/assurance.py`."""
