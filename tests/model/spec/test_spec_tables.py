"""The generated tables equal `protocol.toml`, and the classes in `weightsync/protocol/messages.py` have its fields."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
import typing
from pathlib import Path

import generate
import pytest
from skipping import require_modules

from weightsync.protocol import _tables, messages

MODEL = (Path(__file__).parents[3] / "tla" / "AckProtocol.tla").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def toml(text):
    return tomllib.loads(text)


def names(entries):
    return [entry["name"] for entry in entries]


def values(enum):
    return [member.value for member in enum]


def test_the_enums_have_the_names_in_protocol_toml(toml):
    assert values(_tables.State) == names(toml["state"])
    assert values(_tables.InputKind) == names(toml["input_kind"])
    assert values(_tables.SenderInput) == names(toml["sender"]["input"])
    assert values(_tables.ReceiverInput) == names(toml["receiver"]["input"])
    assert values(_tables.RefusalKind) == names(toml["refusal_kind"])
    assert values(_tables.Delivery) == names(toml["delivery"])


@pytest.mark.parametrize(
    "enum",
    [
        _tables.State,
        _tables.InputKind,
        _tables.SenderInput,
        _tables.ReceiverInput,
        _tables.RefusalKind,
        _tables.Delivery,
    ],
)
def test_enum_members_are_named_after_their_values(enum):
    assert all(member.name == member.value.upper() for member in enum)


@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_the_rows_equal_those_in_protocol_toml(toml, role):
    rows = {"sender": _tables.SENDER_ROWS, "receiver": _tables.RECEIVER_ROWS}[role]
    found = [(source.value, step.value, target.value) for (source, step), target in rows.items()]

    assert found == [
        (source, row["input"], source if row["to"] == "same" else row["to"])
        for row in toml[role]["row"]
        for source in row["from"]
    ]


@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_the_kinds_of_inputs_equal_those_in_protocol_toml(toml, role):
    kinds = {"sender": _tables.SENDER_KINDS, "receiver": _tables.RECEIVER_KINDS}[role]

    assert {step.value: kind.value for step, kind in kinds.items()} == {
        entry["name"]: entry["kind"] for entry in toml[role]["input"]
    }


def test_initial_and_final_state_version_and_guarantees_equal_those_in_protocol_toml(toml):
    protocol = toml["protocol"]

    assert (_tables.INITIAL.value, _tables.FINAL.value) == (protocol["initial"], protocol["final"])
    assert protocol["version"] == _tables.PROTOCOL_VERSION
    assert {id: tuple(guarantee) for id, guarantee in _tables.GUARANTEES.items()} == {
        entry["id"]: (entry["name"], entry["meaning"]) for entry in toml["guarantee"]
    }


def test_the_deliveries_equal_those_in_protocol_toml(toml):
    found = [(each.name, each.reorders, each.duplicates, each.loses) for each in _tables.Delivery]

    assert found == [
        (entry["name"], entry["reorders"], entry["duplicates"], entry["loses"]) for entry in toml["delivery"]
    ]


def test_the_tables_cannot_be_changed():
    for table in (_tables.SENDER_ROWS, _tables.RECEIVER_ROWS, _tables.GUARANTEES):
        with pytest.raises(TypeError):
            table["anything"] = "else"


def test_every_message_class_has_the_fields_in_protocol_toml(toml):
    classes = typing.get_args(messages.Message)

    assert [each.__name__ for each in classes] == names(toml["message"])
    for each, entry in zip(classes, toml["message"], strict=True):
        assert list(each.__struct_fields__) == ["model_id", "incarnation", *entry["fields"]]


def test_the_tables_need_the_standard_library_only(root):
    tree = ast.parse((root / "weightsync/protocol/_tables.py").read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}

    assert not any(isinstance(node, ast.Import) for node in ast.walk(tree))
    assert {module.partition(".")[0] for module in modules} <= sys.stdlib_module_names


def test_every_enum_member_is_documented(root):
    lines = (root / "weightsync/protocol/_tables.py").read_text(encoding="utf-8").splitlines()
    members = [number for number, line in enumerate(lines) if line.startswith("    ") and ' = "' in line]

    assert len(members) == sum(
        len(enum)
        for enum in vars(_tables).values()
        if isinstance(enum, type) and enum.__module__ == _tables.__name__ and hasattr(enum, "__members__")
    )
    assert all(lines[number - 1].startswith("    #: ") for number in members)


UNUSUAL_TEXTS = {
    "as it is": ("no guarded forward pass sees", "no guarded forward pass sees"),
    "quotes": ("no guarded forward pass sees", "no 'guarded' forward, \\\"so called\\\", sees \\\\ | ä"),
    "double quotes": ("no guarded forward pass sees", 'no \\"guarded\\" forward sees'),
    "long": ("no guarded forward pass sees", "no guarded forward sees " * 20),
    "full stop": ("no guarded forward pass sees tensors of two versions", "Nothing is torn."),
    "nobody loses": (
        "reorders = true\nduplicates = true\nloses = true",
        "reorders = false\nduplicates = true\nloses = false",
    ),
}


@pytest.mark.parametrize(("old", "new"), UNUSUAL_TEXTS.values(), ids=UNUSUAL_TEXTS.keys())
def test_unusual_texts_are_rendered_as_formatted_code_with_the_same_meaning(text, tmp_path, old, new):
    require_modules("ruff", what="THAT GENERATED CODE IS FORMATTED", extra="dev")
    assert old in text
    odd = text.replace(old, new)
    rendered = generate.render(odd, {}, MODEL)["weightsync/protocol/_tables.py"]
    (tmp_path / "tables.py").write_text(rendered, encoding="utf-8")

    settings = ["--isolated", "--line-length=120", "--target-version=py311"]
    ruff = [sys.executable, "-m", "ruff"]
    done = subprocess.run(
        [*ruff, "format", "--diff", *settings, "tables.py"], cwd=tmp_path, capture_output=True, check=False
    )

    assert done.stdout.decode() == ""
    space: dict[str, typing.Any] = {}
    exec(compile(rendered, "tables.py", "exec"), space)
    assert {id: each.meaning for id, each in space["GUARANTEES"].items()} == {
        entry["id"]: " ".join(entry["meaning"].split()) for entry in tomllib.loads(odd)["guarantee"]
    }
