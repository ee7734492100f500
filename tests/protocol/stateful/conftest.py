"""The helpers of these tests explain their assertions as tests do."""

import pytest

pytest.register_assert_rewrite("guarantees", "reference", "world")
