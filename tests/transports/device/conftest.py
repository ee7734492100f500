"""Fixtures of a fake device, whose kernels a test can hold up, and of workers on it."""

from __future__ import annotations

from fleet import crew  # noqa: F401 - for all tests here
