"""Each fault of an engine in each phase of an update has the correct outcome, evidence and message."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import pytest
from engine_server import Beside, EngineServer, Inline, equal, serving
from fleet import PATIENCE, large
from torch import nn

from weightsync import EngineWeightSyncScheme, Evidence, Outcome, OutcomeKind, SGLangEngine, VLLMEngine
from weightsync.schemes.engines.client import Engine

#: The calls of each kind of engine: the route, the index of its call, and the stage of the update.
TENSOR = "update_weights_from_tensor"
CALLS = {
    "vllm": [
        ("init_weight_transfer_engine", 0, "join"),
        ("pause?mode=keep", 0, "pause"),
        ("start_weight_update", 0, "begin"),
        ("update_weights", 0, "change"),
        ("update_weights", 1, "change"),
        ("finish_weight_update", 0, "change"),
        ("reset_prefix_cache", 0, "reset"),
        ("resume", 0, "resume"),
    ],
    "sglang": [
        ("pause_generation", 0, "pause"),
        (TENSOR, 0, "begin"),
        (TENSOR, 1, "change"),
        ("flush_cache", 0, "flush"),
        ("continue_generation", 0, "resume"),
    ],
    "sglang with a carrier": [("init_weights_update_group", 0, "join")],
}
#: Faults: a request is rejected or redirected; fails before or after it took effect, or with a success status; the
#: connection is closed before, after or amid the answer; the answer is garbage; there is no answer.
TURNED_AWAY, FAILED, HUNG_UP = (
    (404, 307),
    ("500", "500 after", "unsuccessful", "wrong"),
    ("die", "die after", "half", "half after"),
)
FAULTS = (*TURNED_AWAY, *FAILED, *HUNG_UP, "garbage", "stall")

KEPT = "has the weights that it had"
PERHAPS_PAUSED = f"{KEPT}, and may be paused"
TORN = "may hold parts of two versions, and stays paused"
LOADED = "has loaded the version, but did not confirm that it resumed, and may be paused"
#: The state of the engine after a failure in each stage. An engine that may be paused or torn, or hung up, is lost.
LEAVES = {
    **{"join": KEPT, "pause": PERHAPS_PAUSED, "begin": TORN, "change": TORN},
    **dict.fromkeys(("flush", "reset", "resume"), LOADED),
}
REFUSED = {
    "join": {*TURNED_AWAY, *FAILED, "garbage"},
    "pause": {*TURNED_AWAY, *FAILED, "garbage"},  # the engine may be paused, and is told to resume
    "begin": set(TURNED_AWAY),
}


def expected(stage: str, fault: int | str) -> OutcomeKind:
    if (stage, fault) == ("flush", "garbage"):
        return OutcomeKind.APPLIED  # SGLang answers this call in plain text
    if (stage, fault) == ("reset", "unsuccessful"):
        return OutcomeKind.APPLIED  # running requests hold parts of the prefix cache
    if fault == "stall":
        return OutcomeKind.TIMED_OUT
    return OutcomeKind.REFUSED if fault in REFUSED.get(stage, ()) else OutcomeKind.LOST


def made(kind: str, server: EngineServer) -> Engine:
    match kind:
        case "vllm":
            return VLLMEngine(server.url, Inline(), bucket_bytes=100_000)
        case "sglang":
            return SGLangEngine(server.url, pause="abort", bucket_bytes=100_000)
    return SGLangEngine(server.url, Beside(server), bucket_bytes=100_000)


@pytest.fixture
def server() -> Iterator[EngineServer]:
    with serving() as running:
        yield running


def outcome_of(sender: Any, server: EngineServer, fault: int | str) -> Outcome:
    sender.send_async()
    if fault == "stall":
        assert server.stalled.wait(PATIENCE)
    timeout = 0.0 if fault == "stall" else PATIENCE
    found: Outcome = sender.wait_async(timeout=timeout, on_failure="report")[0]
    return found


def recover(sender: Any, server: EngineServer, engine: Engine, kind: OutcomeKind) -> None:
    """Recover as the outcome's message says."""
    if kind is OutcomeKind.LOST:
        server.restart()
        sender.add_worker(0, engine)
    elif kind is OutcomeKind.TIMED_OUT:
        server.release()
        assert sender.wait_async(timeout=PATIENCE).ok  # the late answer counts


EACH = list(chain.from_iterable(zip(repeat(kind), calls) for kind, calls in CALLS.items()))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("kind", "call"), EACH, ids=[f"{kind}-{call[0]}-{call[1]}" for kind, call in EACH])
def test_g11_the_state_of_a_faulty_engine_is_reported_and_it_takes_the_next_version(
    kind: str, call: tuple[str, int, str], fault: int | str, server: EngineServer
) -> None:
    (route, which, stage), engine, source = call, made(kind, server), large(1.0)
    server.plan[route] = [*repeat("serve", which), fault]
    with EngineWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", engines=[engine], model=source)
        sender = scheme.get_sender()
        outcome = outcome_of(sender, server, fault)

        assert outcome.kind is expected(stage, fault)
        match outcome.kind:
            case OutcomeKind.APPLIED:
                assert equal(server, source)
            case OutcomeKind.REFUSED:
                assert outcome.evidence is Evidence.CALL
                assert f"{route} was answered" in outcome.reason
                assert (server.paused, server.weights) == (False, {})
            case OutcomeKind.LOST:
                assert outcome.evidence is Evidence.NONE
                assert f"{route} " in outcome.reason
                assert f"{engine} still runs, it {LEAVES[stage]}." in outcome.reason or (
                    f"{engine} {LEAVES[stage]}: POST" in outcome.reason
                )
                assert outcome.reason.endswith("Start it again before you call add_worker() for it.")
                assert server.paused or LEAVES[stage] is not TORN
            case _:
                assert f"it has not answered POST {server.url}/{route} yet" in outcome.reason
        recover(sender, server, engine, outcome.kind)
        nn.init.normal_(source[0].weight)
        assert sender.send(timeout=PATIENCE).ok
        assert (equal(server, source), server.paused) == (True, False)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_engine_whose_pause_and_resume_both_failed_is_lost(kind: str, server: EngineServer) -> None:
    pause, resume = (next(route for route, _, stage in CALLS[kind] if stage == of) for of in ("pause", "resume"))
    server.plan[pause], server.plan[resume] = ["500 after"], ["500"]
    with EngineWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", engines=[made(kind, server)], model=large(1.0))
        outcome = scheme.get_sender().send(on_failure="report", timeout=PATIENCE)[0]

    assert outcome.kind is OutcomeKind.LOST
    assert "did not load the version, and may be paused: it did not confirm that it resumed. POST" in outcome.reason
    assert (server.paused, server.weights) == (True, {})


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_unknown_names_or_a_failing_carrier_leave_an_engine_paused_only_if_it_is_lost(
    kind: str, server: EngineServer
) -> None:
    engine = made(kind, server)
    engine.name_map = {"nothing": "embed"}
    with EngineWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", engines=[engine], model=large(1.0))
        outcome = scheme.get_sender().send(on_failure="report", timeout=PATIENCE)[0]
        assert (outcome.kind, server.calls) == (OutcomeKind.REFUSED, [])

    carrier = Inline()
    vars(carrier)["update_info"] = lambda bucket: {}["missing"]
    carried = VLLMEngine(server.url, carrier) if kind == "vllm" else SGLangEngine(server.url, carrier)
    with EngineWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", engines=[carried], model=large(1.0))
        outcome = scheme.get_sender().send(on_failure="report", timeout=PATIENCE)[0]
        assert "KeyError: 'missing'" in outcome.reason
        assert server.paused is (outcome.kind is OutcomeKind.LOST)
        assert (f"{TORN}: KeyError" in outcome.reason) is server.paused
