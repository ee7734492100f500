"""A fake device whose kernels a test holds up where it wants, and workers on it."""

from __future__ import annotations

from fleet import crew  # noqa: F401 - for all tests here
