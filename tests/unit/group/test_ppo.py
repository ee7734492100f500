"""The PPO of the README, with a worker group: it ends, and each result was made with the versions that it names."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from skipping import require_modules
from torch import nn
from torch.distributions import Categorical

from weightsync import WorkerGroup, WorkerResult

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs" / "examples" / "ppo_cartpole.py"
#: Two results precede version 2, and each worker may have made three more by then, of which one waits for room.
UPDATES = 9


@pytest.fixture
def ppo(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    require_modules("gymnasium", what="THE PPO OF THE README", extra="rl")
    monkeypatch.syspath_prepend(EXAMPLE.parent)  # workers import the example too
    yield importlib.import_module(EXAMPLE.stem)
    sys.modules.pop(EXAMPLE.stem)


def test_the_readmes_ppo_ends_and_its_results_name_the_versions_that_made_them(
    ppo: ModuleType, monkeypatch: pytest.MonkeyPatch, forkserver: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    sent: dict[int, dict[str, torch.Tensor]] = {}
    results: list[WorkerResult] = []
    learn = ppo.learn

    groups: list[WorkerGroup] = []

    def started(*args: Any, **options: Any) -> WorkerGroup:
        groups.append(WorkerGroup(*args, ctx=forkserver, **options))
        return groups[0]

    def recorded(policy: nn.Module, optimizer: Any, result: WorkerResult) -> float:
        sent.setdefault(1, {name: each.clone() for name, each in policy.state_dict().items()})
        results.append(result)
        if len(results) == 2:
            groups[0].wait_async()
        length: float = learn(policy, optimizer, result)
        sent[len(sent) + 1] = {name: each.clone() for name, each in policy.state_dict().items()}
        return length

    monkeypatch.setattr(ppo, "learn", recorded)
    monkeypatch.setattr(ppo, "WorkerGroup", started)
    ppo.main(updates=UPDATES)

    assert capsys.readouterr().out.count("acted with versions") == UPDATES
    assert max(version for result in results for version in result.versions) > 1
    for result in results:
        seen, actions, logs, _, _ = result.value
        made_with = torch.stack([_log_probs(ppo, sent[version], seen, actions) for version in result.versions])
        assert torch.isclose(made_with, logs, atol=1e-4).any(0).all()


def _log_probs(
    ppo: ModuleType, weights: dict[str, torch.Tensor], seen: torch.Tensor, actions: torch.Tensor
) -> torch.Tensor:
    policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 3))
    policy.load_state_dict(weights)
    with torch.no_grad():
        return Categorical(logits=policy(seen)[:, :2]).log_prob(actions)


def test_the_readme_shows_the_ppo_program() -> None:
    assert f"```python\n{EXAMPLE.read_text(encoding='utf-8')}```" in (ROOT / "README.md").read_text(encoding="utf-8")
