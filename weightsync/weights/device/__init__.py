"""Weights in the memory of a device, whose kernels go on after the call that launched them has returned."""
