"""What a test does where something that it needs is missing: it says loudly what was not tested, and in CI it fails."""

from __future__ import annotations

import importlib.util
import os
from typing import NoReturn

import pytest

from weightsync.model.toolchain import Toolchain, ToolMissingError, find_toolchain


def not_tested(what: str, why: object) -> NoReturn:
    """Skip the test, or the module that is being imported; where CI is set fail, for CI has every tool.

    Args:
        what: what nobody has tested now.
        why: the tool that is missing, and how it is had.
    """
    said = f"{what} WAS NOT TESTED: {why}"
    if os.environ.get("CI"):
        pytest.fail(f"{said} (CI has to have it)")
    pytest.skip(said, allow_module_level=True)


def without_gpus(what: str, why: object) -> NoReturn:
    """Skip a test of GPUs: the only ones that CI may lack. With WEIGHTSYNC_GPUS set it fails all the same."""
    said = f"{what} WAS NOT TESTED: {why}"
    if os.environ.get("WEIGHTSYNC_GPUS"):
        pytest.fail(f"{said} (WEIGHTSYNC_GPUS says that there are some)")
    pytest.skip(said)


def installed(*modules: str, what: str, extra: str) -> None:
    """Go on only if all of these modules can be imported. A folder of the tests that has a module's name is not it."""
    absent = [module for module in modules if _origin(module) is None]
    if absent:
        not_tested(what, f"no {' and no '.join(absent)} (pip install 'weightsync[{extra}]')")


def _origin(module: str) -> str | None:
    spec = importlib.util.find_spec(module)
    return None if spec is None else spec.origin  # a folder without __init__.py has none


def java_and_tlc(what: str) -> Toolchain:
    """The tools of the model checker."""
    try:
        return find_toolchain()
    except ToolMissingError as error:
        not_tested(what, error)
