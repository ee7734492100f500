"""Checks of the model itself: its mutants, and a second checker beside TLC.

For maintainers of the model, so it is no part of the installed package; `spec/check.py` runs it.
"""
