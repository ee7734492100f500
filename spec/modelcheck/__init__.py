"""Checks of the model itself: its mutants, and a second checker beside TLC.

It is for maintainers of the model, so the installed package does not contain it. `spec/check.py` runs it.
"""
