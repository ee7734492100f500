"""What the tests of the graphs share: each graph is made once."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest
from configurations import CONFIGURATIONS, LARGE
from network import World
from search import explore

from weightsync.checker.process import Size
from weightsync.checker.second import Dump, Graph, GraphRun
from weightsync.checker.second.dump import Model
from weightsync.checker.toolchain import Toolchain, ToolMissingError, find_toolchain

MODEL = Path(__file__).parents[2] / "tla"
_MOST = 400_000


def each(names: object) -> pytest.MarkDecorator:
    """A test for each configuration; the large ones take minutes."""
    slow = (pytest.mark.slow, pytest.mark.timeout(900))
    return pytest.mark.parametrize("name", [pytest.param(name, marks=slow * (name in LARGE)) for name in names])


@cache
def explored(name: str) -> tuple[Graph, list[World]]:
    """What the shipped code reaches. Not to be asked for while the code is changed."""
    return explore(CONFIGURATIONS[name])


def printed(name: str) -> Dump:
    """What TLC reaches."""
    size = Size.LARGE if name in LARGE else Size.SMALL
    return GraphRun(tools(), Model(MODEL, "MC", CONFIGURATIONS[name].text), size, _MOST).run()


def tools() -> Toolchain:
    """Java and TLC; where they cannot be had the test is skipped, in CI it fails."""
    try:
        return find_toolchain()
    except ToolMissingError as error:
        if os.environ.get("CI"):
            pytest.fail(f"CI must compare the graphs: {error}")
        pytest.skip(f"THE GRAPHS WERE NOT COMPARED: {error}")
