"""Assertions in `checks` are rewritten, so that a failure shows the compared values."""

import pytest

pytest.register_assert_rewrite("checks")
