"""Weights in the memory of a device, whose kernels continue after the call that launched them has returned."""
