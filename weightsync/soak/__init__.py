"""`weightsync soak`: random syncs and faults at full speed, and a table of what happened.

A program on the public API. It finds what short tests do not: leaks, rare interleavings, and a machine's own limits.
"""
