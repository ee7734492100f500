"""What `spec/scale.py` measures."""
