"""Skip tests whose tools are missing, with a message that says what was not tested. In CI, fail instead."""

from __future__ import annotations

import importlib.util
import os
from typing import NoReturn

import pytest

from weightsync.model.toolchain import Toolchain, ToolMissingError, find_toolchain


def not_tested(what: str, why: object) -> NoReturn:
    """Skip the test, or the module that is being imported. If CI is set, fail, since CI has every tool.

    Args:
        what: what was not tested, in capitals.
        why: the tool that is missing, and how to install it.
    """
    said = f"{what} WAS NOT TESTED: {why}"
    if os.environ.get("CI"):
        pytest.fail(f"{said} (CI has to have it)")
    pytest.skip(said, allow_module_level=True)


def skip_without_gpus(what: str, why: object) -> NoReturn:
    """Skip a test that needs GPUs, which even CI may lack. If WEIGHTSYNC_GPUS is set, fail."""
    said = f"{what} WAS NOT TESTED: {why}"
    if os.environ.get("WEIGHTSYNC_GPUS"):
        pytest.fail(f"{said} (WEIGHTSYNC_GPUS says that there are some)")
    pytest.skip(said)


def require_modules(*modules: str, what: str, extra: str) -> None:
    """Skip unless all of these modules can be imported. A folder of tests with the name of a module does not count."""
    absent = [module for module in modules if _origin(module) is None]
    if absent:
        not_tested(what, f"no {' and no '.join(absent)} (pip install 'weightsync[{extra}]')")


def _origin(module: str) -> str | None:
    spec = importlib.util.find_spec(module)
    return None if spec is None else spec.origin  # None for a folder without __init__.py


def require_tlc(what: str) -> Toolchain:
    """Java and TLC, or skip."""
    try:
        return find_toolchain()
    except ToolMissingError as error:
        not_tested(what, error)
