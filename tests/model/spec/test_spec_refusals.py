"""The generator refuses an unsound protocol, and names the place of each fault."""

from __future__ import annotations

import generate
import pytest
from protocolgen import actions, checks, source

from weightsync.protocol._tables import PROTOCOL_VERSION

#: A model of two actions.
MODEL = r"""
Next ==
  \/ \E s \in Senders : Wait(s)
  \/ \E w \in Workers,
        v \in 1..2 : LinkDown(w, v)

----
"""
SEND = '[[sender.row]]\nfrom = ["ready"]\ninput = "SEND"\nto = "awaiting_ack"\n'
OPEN = '"uninitialized", "ready", "pending_async", "awaiting_ack", '
CLOSE = f'[[sender.row]]\nfrom = [{OPEN}"closed"]\ninput = "CLOSE"\n'
SHRUG = '[[sender.input]]\nname = "SHRUG"\nkind = "call"\nmeaning = "nothing"\n\n'
LIMBO = '[[state]]\nname = "limbo"\nsender = "nowhere"\nreceiver = "nowhere"\n\n[[state]]\nname = "closed"\n'


def row(source: str, name: str, target: str) -> str:
    """Another row of the sender, followed by the row of SEND."""
    return f'[[sender.row]]\nfrom = ["{source}"]\ninput = "{name}"\nto = "{target}"\n\n{SEND}'


#: Each fault: the text in the file, its replacement, and the expected complaint.
PLANTED = {
    "an unknown state to start from": (
        SEND,
        SEND.replace('"ready"', '"redy"'),
        "sender.row 3 (redy, SEND): unknown state 'redy'",
    ),
    "an unknown state to go to": (
        SEND,
        SEND.replace("awaiting_ack", "waiting"),
        "sender.row 3 (ready, SEND): unknown state 'waiting'",
    ),
    "an unknown input": (
        SEND,
        SEND.replace("SEND", "SENT"),
        "sender.row 3 (ready, SENT): unknown input 'SENT' of the sender",
    ),
    "an input of the other role": (
        SEND,
        row("ready", "UPDATE", "ready"),
        "sender.row 3 (ready, UPDATE): unknown input 'UPDATE' of the sender",
    ),
    "a row twice": (
        SEND,
        row("ready", "SEND", "ready"),
        "sender.row 4 (ready, SEND): duplicate row, sender.row 3 has that state and input already",
    ),
    "a state twice in one row": (
        SEND,
        SEND.replace('["ready"]', '["ready", "ready"]'),
        "sender.row 3 (ready, SEND): duplicate row, sender.row 3 has that state and input already",
    ),
    "an unreachable state": (
        '[[state]]\nname = "closed"\n',
        LIMBO,
        "state 5 (limbo): unreachable, no rows of the sender lead to it",
    ),
    "a state that another is needed to reach": (
        '[[sender.row]]\nfrom = ["uninitialized"]\ninput = "CONNECT"\nto = "ready"\n',
        '[[sender.row]]\nfrom = ["uninitialized"]\ninput = "CONNECT"\nto = "same"\n',
        "sender.row 3 (ready, SEND): dead row, the sender never is in 'ready'",
    ),
    "no way to the end": (
        CLOSE,
        CLOSE.replace(OPEN, ""),
        "state 3 (pending_async): a trap, the sender cannot get to 'closed'",
    ),
    "an input that no row uses": (
        '[[sender.input]]\nname = "CLOSE"\n',
        SHRUG + '[[sender.input]]\nname = "CLOSE"\n',
        "sender.input 18 (SHRUG): dead input, no row of the sender uses it",
    ),
    "a row that leaves the final state": (
        SEND,
        row("closed", "CONNECT", "ready"),
        "sender.row 3 (closed, CONNECT): leaves the final state 'closed' for 'ready'",
    ),
    "an input twice": (
        '[[receiver.input]]\nname = "NEWER"\n',
        '[[receiver.input]]\nname = "STALE"\n',
        "receiver.input 7 (STALE): the name is taken by receiver.input 6",
    ),
    "an unknown kind of input": (
        'name = "WAIT"\nkind = "call"\n',
        'name = "WAIT"\nkind = "chance"\n',
        "sender.input 5 (WAIT): unknown kind 'chance'",
    ),
    "a kind that no input is of": (
        '[[input_kind]]\nname = "time"\n',
        '[[input_kind]]\nname = "chance"\nmeaning = "dice"\n\n[[input_kind]]\nname = "time"\n',
        "input_kind 4 (chance): no input is of this kind",
    ),
    "a name that Python cannot have": (
        'name = "WAIT"\n',
        'name = "wait for it"\n',
        "sender.input 5: 'wait for it' cannot be a name here",
    ),
    "an undocumented state": (
        'sender = "final"\n',
        "",
        "state 5: 'sender' is missing",
    ),
    "an undocumented input": (
        'meaning = "the answer was sent"\n',
        "",
        "receiver.input 14: 'meaning' is missing",
    ),
    "a meaning that says nothing": (
        'meaning = "the answer was sent"\n',
        'meaning = " "\n',
        "receiver.input 14: 'meaning' must be text that is not empty",
    ),
    "an undocumented guarantee": (
        'name = "NoTornRead"\nmeaning = "no guarded forward pass sees tensors of two versions"\n',
        'name = "NoTornRead"\n',
        "guarantee 3: 'meaning' is missing",
    ),
    "a guarantee out of order": (
        'id = "G7"\n',
        'id = "G70"\n',
        "guarantee 7 (OnlyTargetsChange): its id is 'G70', wanted 'G7'",
    ),
    "an unknown initial state": (
        'initial = "uninitialized"\n',
        'initial = "fresh"\n',
        "protocol.initial: unknown state 'fresh'",
    ),
    "a message from nobody": (
        'name = "Ack"\nfrom = ["receiver"]\n',
        'name = "Ack"\nfrom = ["worker"]\n',
        "message 3 (Ack): unknown speaker 'worker'",
    ),
    "a field twice": (
        'fields = ["version", "digest", "seconds", "evidence", "nested"]\n',
        'fields = ["version", "version"]\n',
        "message 3 (Ack): the field 'version' is listed twice",
    ),
    "a field that all messages have": (
        'fields = ["version", "digest", "seconds", "evidence", "nested"]\n',
        'fields = ["model_id"]\n',
        "message 3 (Ack): every message has 'model_id', so it is not listed",
    ),
    "two deliveries that promise the same": (
        'name = "REORDERED"\nreorders = true\n',
        'name = "REORDERED"\nreorders = false\n',
        "delivery 2 (REORDERED): promises the same as ORDERED",
    ),
    "an unknown key": (
        SEND,
        SEND + 'unless = "raining"\n',
        "sender.row 3: unknown key 'unless'",
    ),
    "an unknown table": (
        "[protocol]\n",
        "[weather]\n\n[protocol]\n",
        "protocol.toml: unknown key 'weather'",
    ),
    "a row from no state": (
        SEND,
        SEND.replace('["ready"]', "[]"),
        "sender.row 3: 'from' must be a list of names, at least one",
    ),
    "a version that is no number": (
        f"version = {PROTOCOL_VERSION}\n",
        'version = "1"\n',
        "protocol: 'version' must be a whole number from 1",
    ),
    "a promise that is neither kept nor not": (
        "loses = true\n",
        'loses = "sometimes"\n',
        "delivery 4: 'loses' must be true or false",
    ),
    "no TOML": (
        "[protocol]\n",
        "[protocol\n",
        "protocol.toml: ",
    ),
}


@pytest.mark.parametrize(("old", "new", "complaint"), PLANTED.values(), ids=PLANTED.keys())
def test_the_generator_refuses_an_unsound_protocol_and_names_the_place(text, old, new, complaint):
    assert text.count(old) >= 1, "the file has changed: plant this fault anew"

    with pytest.raises(source.SpecError) as caught:
        generate.render(text.replace(old, new, 1), {}, MODEL)

    assert complaint in str(caught.value)


def test_a_row_that_leads_into_a_trap_state_is_reported(text):
    trapped = text.replace('[[state]]\nname = "closed"\n', LIMBO).replace(SEND, row("ready", "CONNECT", "limbo"))

    with pytest.raises(source.SpecError) as caught:
        generate.render(trapped, {}, MODEL)

    assert "sender.row 3 (ready, CONNECT): leads into the trap 'limbo'" in caught.value.complaints
    assert "state 5 (limbo): a trap, the sender cannot get to 'closed'" in caught.value.complaints


def test_all_faults_are_reported_at_once(text):
    broken = text.replace(SEND, SEND.replace("SEND", "SENT")).replace('id = "G7"', 'id = "G70"')

    with pytest.raises(source.SpecError) as caught:
        generate.render(broken, {}, MODEL)

    assert len(caught.value.complaints) == 2


def test_the_real_protocol_is_sound(text):
    checks.check(source.read(text))


def test_a_refused_protocol_writes_nothing(tree, text, capsys):
    (tree / "spec/protocol.toml").write_text(text.replace(SEND, SEND.replace("SEND", "SENT")))
    before = {path: path.read_bytes() for path in tree.rglob("*.*") if path.is_file()}

    assert generate.main([]) == 2
    assert "sender.row 3 (ready, SENT): unknown input" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tree.rglob("*.*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ("<!-- generated: stats -->\n<!-- /generated -->\n", "README.md: no part is called 'stats'"),
        ("<!-- generated: states -->\n", "README.md: the generated part 'states' does not end"),
        (
            "<!-- generated: states -->\n<!-- generated: messages -->\n<!-- /generated -->\n",
            "README.md: the generated part 'states' does not end",
        ),
    ],
)
def test_an_unknown_or_unclosed_marker_in_a_document_is_refused(text, document, complaint):
    with pytest.raises(source.SpecError) as caught:
        generate.render(text, {"README.md": document}, MODEL)

    assert complaint in str(caught.value)


def test_the_generated_actions_are_those_of_the_model() -> None:
    assert actions.names(MODEL) == ["Wait", "LinkDown"]
    assert actions.render(MODEL).count('    WAIT = "Wait"\n    LINK_DOWN = "LinkDown"\n') == 1


@pytest.mark.parametrize("model", ["", MODEL.replace("LinkDown(w, v)", "x' = 1")])
def test_a_model_whose_actions_have_no_names_is_refused(text, model) -> None:
    with pytest.raises(source.SpecError, match="each disjunct of Next must be a named action"):
        generate.render(text, {}, model)
