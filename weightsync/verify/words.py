"""Lines and values of traces in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weightsync.engine.recorder import What
from weightsync.protocol._tables import RECEIVER_ROWS, SENDER_ROWS, State
from weightsync.verify.lines import Finding, Line

_SHORT = 24


def story(line: Line) -> str:
    """A line in one sentence."""
    said, who = line.said, f"{line.said.get('role', 'the recorder')} of model {line.said.get('model')!r}"
    match line.what:
        case What.STEP:
            named = said.get("input") or "no input (LATE)"
            moved = f"from {state_name(said.get('before'))} to {state_name(said.get('after'))}"
            return f"{who} takes {value(said.get('event'))}, which is {named}, and goes {moved}"
        case What.REFUSED:
            return f"{who}, {state_name(said.get('before'))}, refuses {value(said.get('event'))}: {said.get('error')}"
        case What.SENT | What.RECEIVED:
            done = "sends" if line.what is What.SENT else "takes"
            return f"{who} {done} {value(said.get('message'))} over link {said.get('link')}"
        case What.LINK:
            to = f" to worker {said['worker']}" if "worker" in said else ""
            return f"{who} lays link {said.get('link')}{to}, which promises {said.get('delivery')}"
        case What.TOLD:
            return f"{who} reports version {said.get('version')}: {value(said.get('outcomes'))}"
        case What.HEADER | What.NOTE | What.END:
            return f"{line.what.value}: {said.get('text', '')}"
        case _:
            about = f" link {said['link']}" if "link" in said else ""
            return f"{who}: {line.what.value}{about}"


def shown(finding: Finding) -> Iterator[str]:
    """A wrong line, and what the model allows there."""
    yield f"{finding.line.place}: {finding.what}."
    if finding.line.said.get("what"):
        yield f"  the trace:  {story(finding.line)}"
    for allowed in finding.allowed:
        yield f"  the model:  {allowed}"
    yield f"  rule:       {finding.rule}"


def value(told: Any) -> str:
    """A recorded value, shortened for reading."""
    if isinstance(told, dict):
        inner = ", ".join(f"{name}={value(each)}" for name, each in told.items() if name not in _DULL)
        return f"{told.get('is', '')}({inner})"
    if isinstance(told, list):
        return f"[{', '.join(map(value, told))}]"
    if isinstance(told, int) and not isinstance(told, bool):
        return number(told)
    text = repr(told) if isinstance(told, str) else str(told)
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}..."


_DULL = frozenset({"is", "model_id", "host", "pid", "started", "layout", "seconds", "remote_traceback"})


def number(told: int) -> str:
    """A number; for an incarnation its last digits."""
    return f"..{told % 10**8:08d}" if told > 2**64 else str(told)


def state_name(told: Any) -> str:
    """A state as the tables spell it."""
    return State[told].value if told in State.__members__ else repr(told)


def possible(role: str, state: State) -> str:
    """The inputs that have a row in a state."""
    rows = SENDER_ROWS if role == "sender" else RECEIVER_ROWS
    named = [f"{input.value} -> {to.value}" for (source, input), to in rows.items() if source is state]
    return f"rows of a {role} in {state.value}: {', '.join(named)}"


def differences(told: Any, wanted: Any, where: str = "") -> Iterator[str]:
    """The innermost differences between a recorded value and the expected one."""
    if isinstance(told, dict) and isinstance(wanted, dict):
        for name in {**told, **wanted}:
            yield from differences(told.get(name), wanted.get(name), f"{where}.{name}" if where else name)
    elif told != wanted:
        yield f"{where or 'it'} is {value(told)}, but must be {value(wanted)}"
