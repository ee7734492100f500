"""Both schemes end to end under each start method, and the programs in the documents."""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest
from code_blocks import blocks
from fleet import PATIENCE, SCHEMES, Crew, constants, filled, join, large, receive

from weightsync import TransportError, WorkerLostError

ROOT = Path(__file__).parents[3]


def rollout(jobs: list[tuple[Any, Any]], results: Any) -> None:
    """A worker of both schemes: receives until its trainers have gone, and reports the versions that it served."""
    for scheme, pipe in jobs:
        model = large(0.0)
        scheme.init_on_worker("policy", pipe=pipe, model=model)
        seen = []
        try:
            while True:
                if scheme.get_receiver().receive(timeout=PATIENCE):
                    seen.append((scheme.get_receiver().version, sorted(constants(model))))
        except TransportError:
            results.send(seen)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_both_schemes_deliver_all_versions_under_each_start_method(method: str, forkserver: Any) -> None:
    context = forkserver if method == "forkserver" else multiprocessing.get_context(method)
    source = large(0.0)
    results, far = context.Pipe()
    links = [(scheme_class(), *context.Pipe()) for scheme_class in SCHEMES.values()]
    for scheme, ours, _ in links:
        scheme.init_on_sender("policy", pipes=[ours], model=source)
    jobs = [(scheme, theirs) for scheme, _, theirs in links]
    process = context.Process(target=rollout, args=(jobs, far))
    process.start()
    for scheme, _, _ in links:
        with scheme.get_sender() as sender:
            for fill in (1.0, 2.0, 3.0):
                filled(source, fill)
                assert sender.send(timeout=100).ok
        assert results.poll(PATIENCE)
        assert results.recv() == [(1, [1.0]), (2, [2.0]), (3, [3.0])]
    process.join(PATIENCE)

    assert process.exitcode == 0


def test_the_readme_example_runs_and_prints_its_report(
    tmp_path: Path, forkserver: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example, _ = blocks((ROOT / "README.md").read_text(encoding="utf-8"))  # the second block is a test of worker groups
    source = example.replace('if __name__ == "__main__":', "def main():")
    (tmp_path / "readme_example.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    spec = importlib.util.find_spec("readme_example")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "readme_example", module)
    spec.loader.exec_module(module)
    # Use a forkserver that has imported torch, since a spawned process would have to import it.
    monkeypatch.setattr(multiprocessing, "get_context", lambda _method: forkserver)
    module.main()

    killed, left = multiprocessing.Pipe()
    killed.close()
    module.worker(module.SharedMemWeightSyncScheme(), left)  # must return without an error

    assert len(example.strip().splitlines()) <= 35
    assert "version 1 of 'policy' [worker 0: APPLIED, worker 1: APPLIED]" in capsys.readouterr().out


def test_the_guides_code_replaces_a_lost_worker(scheme_class: Any, crew: Crew) -> None:
    (code,) = (
        block for block in blocks((ROOT / "docs/guide.md").read_text(encoding="utf-8")) if "start_worker" in block
    )
    (first,) = crew.start(scheme_class())
    with scheme_class() as scheme:
        scheme.init_on_sender("policy", pipes=[first.pipe], model=large(2.0))
        sender = scheme.get_sender()
        first.do(join, large)
        first.tell(receive)
        sender.send(timeout=PATIENCE)
        first.answer()
        first.kill()
        started = []

        def start_worker(worker_id: int, pipe: Any) -> None:
            second = scheme_class()
            second.init_on_worker("policy", pipe=pipe, model=large())
            started.append((worker_id, second))

        names = {
            "sender": sender,
            "start_worker": start_worker,
            "WorkerLostError": WorkerLostError,
            "multiprocessing": multiprocessing,
        }
        exec(compile(code, "docs/guide.md", "exec"), names)
        ((worker_id, second),) = started
        assert worker_id == 0
        assert second.get_receiver().receive(timeout=PATIENCE)
        assert constants(second.get_receiver().model) == {2.0}
        second.close()
