"""Lines and values of traces in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weightsync.engine.recorder import LineKind
from weightsync.protocol._tables import RECEIVER_ROWS, SENDER_ROWS, State
from weightsync.protocol.machine import Role
from weightsync.verify.lines import Finding, Line

_SHORT = 24
#: No value of the protocol is nested as deeply.
_DEEPEST = 20


def story(line: Line) -> str:
    """A line in one sentence."""
    fields, who = line.fields, f"{line.fields.get('role', 'the recorder')} of model {line.fields.get('model')!r}"
    match line.what:
        case LineKind.STEP:
            named = fields.get("input") or "no input (LATE)"
            moved = f"from {state_name(fields.get('before'))} to {state_name(fields.get('after'))}"
            return f"{who} takes {value(fields.get('event'))}, which is {named}, and goes {moved}"
        case LineKind.REFUSED:
            event, error = value(fields.get("event")), fields.get("error")
            return f"{who}, {state_name(fields.get('before'))}, refuses {event}: {error}"
        case LineKind.SENT | LineKind.RECEIVED:
            done = "sends" if line.what is LineKind.SENT else "takes"
            return f"{who} {done} {value(fields.get('message'))} over link {fields.get('link')}"
        case LineKind.LINK:
            to = f" to worker {fields['worker']}" if "worker" in fields else ""
            return f"{who} creates link {fields.get('link')}{to}, which promises {fields.get('delivery')}"
        case LineKind.REPORTED:
            return f"{who} reports version {fields.get('version')}: {value(fields.get('outcomes'))}"
        case LineKind.HEADER | LineKind.NOTE | LineKind.END:
            return f"{line.what.value}: {fields.get('text', '')}"
        case _:
            about = f" link {fields['link']}" if "link" in fields else ""
            return f"{who}: {line.what.value}{about}"


def shown(finding: Finding) -> Iterator[str]:
    """A wrong line, and what the model allows there."""
    yield f"{finding.line.place}: {finding.what}."
    if finding.line.is_known:
        yield f"  the trace:  {story(finding.line)}"
    for allowed in finding.allowed:
        yield f"  the model:  {allowed}"
    yield f"  rule:       {finding.rule}"


def value(recorded: Any, depth: int = 0) -> str:
    """A recorded value, shortened for reading."""
    if depth > _DEEPEST:
        return "..."
    if isinstance(recorded, dict):
        inner = ", ".join(
            f"{name}={value(each, depth + 1)}" for name, each in recorded.items() if name not in _OMITTED_FIELDS
        )
        return f"{recorded.get('is', '')}({inner})"
    if isinstance(recorded, list):
        return f"[{', '.join(value(each, depth + 1) for each in recorded)}]"
    if isinstance(recorded, int) and not isinstance(recorded, bool):
        return number(recorded)
    text = repr(recorded) if isinstance(recorded, str) else str(recorded)
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}..."


_OMITTED_FIELDS = frozenset({"is", "model_id", "host", "pid", "started", "layout", "seconds", "remote_traceback"})


def number(recorded: int) -> str:
    """A number; for an incarnation its last digits."""
    return f"..{recorded % 10**8:08d}" if recorded > 2**64 else str(recorded)


def state_name(recorded: Any) -> str:
    """A state as the tables spell it."""
    known = isinstance(recorded, str) and recorded in State.__members__
    return State[recorded].value if known else repr(recorded)


def possible(role: Role, state: State) -> str:
    """The inputs that have a row in a state."""
    rows = SENDER_ROWS if role is Role.SENDER else RECEIVER_ROWS
    named = [f"{input.value} -> {to.value}" for (source, input), to in rows.items() if source is state]
    return f"rows of a {role} in {state.value}: {', '.join(named)}"


def differences(recorded: Any, wanted: Any, where: str = "") -> Iterator[str]:
    """The innermost differences between a recorded value and the expected one."""
    if recorded == wanted:
        return
    if isinstance(recorded, dict) and isinstance(wanted, dict):
        for name in {**recorded, **wanted}:
            yield from differences(recorded.get(name), wanted.get(name), f"{where}.{name}" if where else name)
    else:
        yield f"{where or 'it'} is {value(recorded)}, but must be {value(wanted)}"
