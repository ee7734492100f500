"""Message sequence charts in Mermaid, drawn from the lines of a trace of one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightsync.engine.recorder import LineKind
from weightsync.verify import Line

#: Inputs that need no note, because the arrow shows them, unless the state changes.
_SHOWN_BY_THE_ARROW = {"ARRIVED", "REPLY"}


@dataclass
class _Drawing:
    """The participants, and the messages in transit."""

    #: Machine to the name of its column.
    names: dict[str, str] = field(default_factory=dict)
    #: (incarnation, link number of the sender) to the machines at its ends, as far as they are known.
    senders: dict[tuple[int, int], str] = field(default_factory=dict)
    receivers: dict[tuple[int, int], str] = field(default_factory=dict)
    #: (machine, its link number) to (incarnation, link number of the sender).
    links: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    #: Messages sent but not read yet: the sending machine, its link, and the message.
    flying: list[tuple[str, int, Mapping[str, Any]]] = field(default_factory=list)


def chart(lines: Sequence[Line]) -> Iterator[str]:
    """The lines of a sequence diagram."""
    drawing = _Drawing()
    _name(drawing, lines)
    yield "sequenceDiagram"
    for name in sorted(drawing.names.values(), key=lambda each: (each.startswith("worker"), each)):
        yield f"  participant {name.replace(' ', '')} as {name}"
    for line in lines:
        yield from _drawn(drawing, line)
    for machine, link, message in drawing.flying:
        other = _other_end(drawing, machine, link)
        if other and message["is"] != "Bye":
            yield f"  {_column(drawing, machine)}-x{_column(drawing, other)}: {_words(message)}"


def _name(drawing: _Drawing, lines: Sequence[Line]) -> None:
    """Name the columns, and find the ends of each link from the handshakes."""
    counts = {"sender": 0, "receiver": 0}
    for line in lines:
        said = line.fields
        if line.what is LineKind.BORN:
            name = f"trainer {counts['sender'] + 1}" if said["role"] == "sender" else f"worker {counts['receiver']}"
            counts[said["role"]] += 1
            drawing.names[line.machine] = name
        if line.what in (LineKind.SENT, LineKind.RECEIVED) and said["message"]["is"] == "Hello":
            message = said["message"]
            link = (message["incarnation"], message.get("link", 0))
            drawing.links.setdefault((line.machine, said["link"]), link)
            ends = drawing.senders if said["role"] == "sender" else drawing.receivers
            ends.setdefault(link, line.machine)


def _drawn(drawing: _Drawing, line: Line) -> Iterator[str]:
    said, machine = line.fields, line.machine
    match line.what:
        case LineKind.SENT:
            drawing.flying.append((machine, said["link"], said["message"]))
        case LineKind.RECEIVED:
            other = _other_end(drawing, machine, said["link"])
            _landed(drawing, other, said["message"])
            yield f"  {_column(drawing, other)}->>{_column(drawing, machine)}: {_words(said['message'])}"
        case LineKind.STEP if _worth_a_note(said):
            yield f"  Note over {_column(drawing, machine)}: {_step(said)}"
        case LineKind.REFUSED:
            yield f"  Note over {_column(drawing, machine)}: {said['event']['is']} is refused"
        case _:
            pass


def _worth_a_note(said: Mapping[str, Any]) -> bool:
    moved = said["before"] != said["after"]
    return moved or (said["input"] is not None and said["input"] not in _SHOWN_BY_THE_ARROW)


def _step(said: Mapping[str, Any]) -> str:
    moved = f" → {said['after'].lower()}" if said["before"] != said["after"] else ""
    version = said["data"].get("version", 0)
    of = f" {version}" if said["input"] in ("SEND", "SEND_ASYNC") else ""
    return f"{said['input']}{of}{moved}"


def _landed(drawing: _Drawing, sender: str, message: Mapping[str, Any]) -> None:
    for place, (machine, _, flown) in enumerate(drawing.flying):
        if machine == sender and flown == message:
            del drawing.flying[place]
            return


def _other_end(drawing: _Drawing, machine: str, link: int) -> str:
    joined = drawing.links.get((machine, link), (0, 0))
    ends = (drawing.senders.get(joined, ""), drawing.receivers.get(joined, ""))
    return next((end for end in ends if end and end != machine), "")


def _column(drawing: _Drawing, machine: str) -> str:
    return drawing.names[machine].replace(" ", "")


def _words(message: Mapping[str, Any]) -> str:
    """Describe a message, without anything that depends on the time of the run."""
    version = f" {message['version']}" if message.get("version") else ""
    kind = f", {message['kind'].lower()}" if "kind" in message else ""
    return f"{message['is']}{version}{kind}"
