"""The checks explain their assertions as tests do."""

import pytest

pytest.register_assert_rewrite("checks")
