"""The pure halves of sender and receiver: name the input, look up its row, return what follows.

They know no clock, no I/O, no torch and no transport. `step` is the whole of each.
"""
