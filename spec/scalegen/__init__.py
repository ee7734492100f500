"""The measurements of `spec/scale.py`."""
