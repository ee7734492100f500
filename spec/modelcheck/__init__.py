"""What holds the model itself to account: its mutants, a second checker beside TLC, and what TLC is given to check.

For maintainers of the model, so it is no part of the installed package; `spec/check.py` runs it.
"""
