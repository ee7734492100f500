"""Drops the cached graphs after the last test of this folder.

They have millions of objects. In later tests each garbage collection would visit all of them, which takes most of a
second.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
from machines import forget

HERE = Path(__file__).parent


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    if nextitem is not None and nextitem.path.parent == HERE:
        return
    forget()
    for module in list(sys.modules.values()):
        if Path(getattr(module, "__file__", None) or "").parent == HERE:
            for each in vars(module).values():
                if isinstance(each, functools._lru_cache_wrapper):
                    each.cache_clear()
