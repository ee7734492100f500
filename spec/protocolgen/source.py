"""Reads `protocol.toml`. The module `checks` validates the result."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

#: The target of a row that does not change the state.
SAME = "same"


class SpecError(ValueError):
    """`protocol.toml` is not valid. There is one complaint per line, each with its location."""

    def __init__(self, complaints: Sequence[str]) -> None:
        super().__init__("\n".join(complaints))
        self.complaints = tuple(complaints)


@dataclass(frozen=True, slots=True)
class Word:
    """A name with a meaning: an input kind or a refusal kind."""

    place: str
    name: str
    meaning: str


@dataclass(frozen=True, slots=True)
class State:
    """A state, with what it means for each role."""

    place: str
    name: str
    sender: str
    receiver: str


@dataclass(frozen=True, slots=True)
class Input:
    """An input of one role."""

    place: str
    name: str
    kind: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Row:
    """One transition of one role. A row of the file stands for one transition from each state in its `from`."""

    place: str
    source: str
    input: str
    target: str

    def __str__(self) -> str:
        return f"{self.place} ({self.source}, {self.input})"


@dataclass(frozen=True, slots=True)
class Role:
    """The inputs and rows of the sender or of the receiver."""

    name: str
    inputs: tuple[Input, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """A message, the roles that send it, and its fields besides model_id and incarnation."""

    place: str
    name: str
    speakers: tuple[str, ...]
    fields: tuple[str, ...]
    meaning: str


@dataclass(frozen=True, slots=True)
class Delivery:
    """A delivery that a transport may declare for its links."""

    place: str
    name: str
    reorders: bool
    duplicates: bool
    loses: bool
    meaning: str


@dataclass(frozen=True, slots=True)
class Guarantee:
    """A guarantee to the user."""

    place: str
    id: str
    name: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Protocol:
    """The whole file."""

    version: int
    initial: str
    final: str
    states: tuple[State, ...]
    kinds: tuple[Word, ...]
    sender: Role
    receiver: Role
    messages: tuple[Message, ...]
    refusals: tuple[Word, ...]
    deliveries: tuple[Delivery, ...]
    guarantees: tuple[Guarantee, ...]

    @property
    def roles(self) -> tuple[Role, Role]:
        """The sender, then the receiver."""
        return self.sender, self.receiver


class _Table:
    """One table of the file, read strictly: every key must be present and of its type, and no other key may be."""

    def __init__(self, place: str, entries: object) -> None:
        if not isinstance(entries, dict):
            raise SpecError([f"{place}: a table is wanted"])
        self.place = place
        self._entries: dict[str, object] = dict(entries)

    def text(self, key: str) -> str:
        """A string that is not empty, joined to one line."""
        value = self._take(key)
        if not isinstance(value, str) or not value.strip():
            raise SpecError([f"{self.place}: '{key}' must be text that is not empty"])
        return " ".join(value.split())

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings, at least one."""
        value = self._take(key)
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise SpecError([f"{self.place}: '{key}' must be a list of names, at least one"])
        return tuple(value)

    def yes_or_no(self, key: str) -> bool:
        """A boolean."""
        value = self._take(key)
        if not isinstance(value, bool):
            raise SpecError([f"{self.place}: '{key}' must be true or false"])
        return value

    def number(self, key: str) -> int:
        """A whole number from 1."""
        value = self._take(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SpecError([f"{self.place}: '{key}' must be a whole number from 1"])
        return value

    def table(self, key: str) -> _Table:
        """A table in this one."""
        return _Table(self._inner(key), self._take(key))

    def tables(self, key: str) -> Iterator[_Table]:
        """A non-empty array of tables in this one; their locations count from 1."""
        value = self._take(key)
        if not isinstance(value, list) or not value:
            raise SpecError([f"{self._inner(key)}: at least one [[{self._inner(key)}]] is wanted"])
        for number, entries in enumerate(value, start=1):
            yield _Table(f"{self._inner(key)} {number}", entries)

    def finish(self) -> None:
        """Refuse keys that were not read.

        Raises:
            SpecError: there is one.
        """
        if self._entries:
            raise SpecError([f"{self.place or 'protocol.toml'}: unknown key '{next(iter(self._entries))}'"])

    def _inner(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key

    def _take(self, key: str) -> object:
        if key not in self._entries:
            raise SpecError([f"{self.place or 'protocol.toml'}: '{key}' is missing"])
        return self._entries.pop(key)


def read(text: str) -> Protocol:
    """Read the protocol from a TOML text.

    Args:
        text: the contents of `protocol.toml`.

    Returns:
        The protocol, not yet checked.

    Raises:
        SpecError: it is not TOML, or a key is missing, unknown, empty or of the wrong type.
    """
    try:
        entries: Mapping[str, object] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError([f"protocol.toml: {error}"]) from error
    root = _Table("", entries)
    head = root.table("protocol")
    protocol = Protocol(
        version=head.number("version"),
        initial=head.text("initial"),
        final=head.text("final"),
        states=tuple(_state(table) for table in root.tables("state")),
        kinds=tuple(_word(table) for table in root.tables("input_kind")),
        sender=_role(root.table("sender")),
        receiver=_role(root.table("receiver")),
        messages=tuple(_message(table) for table in root.tables("message")),
        refusals=tuple(_word(table) for table in root.tables("refusal_kind")),
        deliveries=tuple(_delivery(table) for table in root.tables("delivery")),
        guarantees=tuple(_guarantee(table) for table in root.tables("guarantee")),
    )
    head.finish()
    root.finish()
    return protocol


def _state(table: _Table) -> State:
    state = State(table.place, table.text("name"), table.text("sender"), table.text("receiver"))
    table.finish()
    return state


def _word(table: _Table) -> Word:
    word = Word(table.place, table.text("name"), table.text("meaning"))
    table.finish()
    return word


def _role(table: _Table) -> Role:
    inputs = tuple(_input(entry) for entry in table.tables("input"))
    rows = tuple(row for entry in table.tables("row") for row in _rows(entry))
    table.finish()
    return Role(table.place, inputs, rows)


def _input(table: _Table) -> Input:
    found = Input(table.place, table.text("name"), table.text("kind"), table.text("meaning"))
    table.finish()
    return found


def _rows(table: _Table) -> Iterator[Row]:
    sources, name, target = table.texts("from"), table.text("input"), table.text("to")
    table.finish()
    for source in sources:
        yield Row(table.place, source, name, source if target == SAME else target)


def _message(table: _Table) -> Message:
    speakers, fields = table.texts("from"), table.texts("fields")
    message = Message(table.place, table.text("name"), speakers, fields, table.text("meaning"))
    table.finish()
    return message


def _delivery(table: _Table) -> Delivery:
    delivery = Delivery(
        table.place,
        table.text("name"),
        reorders=table.yes_or_no("reorders"),
        duplicates=table.yes_or_no("duplicates"),
        loses=table.yes_or_no("loses"),
        meaning=table.text("meaning"),
    )
    table.finish()
    return delivery


def _guarantee(table: _Table) -> Guarantee:
    guarantee = Guarantee(table.place, table.text("id"), table.text("name"), table.text("meaning"))
    table.finish()
    return guarantee
