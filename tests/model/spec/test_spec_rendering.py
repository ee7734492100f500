"""The generated files have the content of `protocol.toml`, and `--check` detects any change of them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import generate
import pytest

MODEL = (Path(__file__).parents[3] / "tla" / "AckProtocol.tla").read_text(encoding="utf-8")

GENERATED = ("weightsync/protocol/_tables.py", "tla/Tables.tla", "docs/protocol.md")
ROLES = ("sender", "receiver")


@pytest.fixture(scope="session")
def rows(text):
    """Each role's rows as {(from, input, to)}, read independently of the generator."""
    toml = tomllib.loads(text)
    return {
        role: {
            (source, row["input"], source if row["to"] == "same" else row["to"])
            for row in toml[role]["row"]
            for source in row["from"]
        }
        for role in ROLES
    }


@pytest.fixture(scope="session")
def document(root):
    return (root / "docs/protocol.md").read_text(encoding="utf-8")


def part(document: str, name: str) -> str:
    return document.partition(f"<!-- generated: {name} -->\n")[2].partition("<!-- /generated -->")[0]


def test_the_committed_files_equal_the_generated_ones(capsys):
    assert generate.main(["--check"]) == 0, capsys.readouterr().out


def test_the_generator_runs_as_a_script_from_any_directory(root, tmp_path):
    script = root / "spec/generate.py"

    done = subprocess.run(
        [sys.executable, script, "--check"], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_rendering_again_changes_nothing(tree, capsys):
    assert generate.main([]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", GENERATED)
def test_a_missing_generated_file_or_section_is_written_again(tree, root, name):
    if name.endswith(".md"):
        (tree / name).write_text(re.sub(r"(?s)(<!-- g\S+ \S+ -->\n).*?(<!-- /)", r"\1\2", (tree / name).read_text()))
    else:
        (tree / name).unlink()

    assert generate.main(["--check"]) == 1
    assert generate.main([]) == 0
    assert (tree / name).read_bytes() == (root / name).read_bytes()


@pytest.mark.parametrize("name", GENERATED)
@pytest.mark.parametrize("edit", ["changed", "added", "removed", "line ends"])
def test_check_names_an_edited_file_and_its_first_differing_line(tree, capsys, name, edit):
    lines = (tree / name).read_bytes().splitlines(keepends=True)
    number = next(number for number, line in enumerate(lines) if b"awaiting_ack" in line)
    match edit:
        case "changed":
            lines[number] = lines[number].replace(b"awaiting_ack", b"awaiting-ack")
        case "added":
            lines.insert(number, b"something\n")
        case "removed":
            del lines[number]
        case "line ends":
            lines[number] = lines[number].replace(b"\n", b"\r\n")
    (tree / name).write_bytes(b"".join(lines))

    assert generate.main(["--check"]) == 1
    assert capsys.readouterr().out.startswith(f"{name}:{number + 1}: ")


@pytest.mark.parametrize("name", ["weightsync/protocol/_tables.py", "tla/Tables.tla"])
def test_check_fails_for_a_truncated_extended_or_missing_file(tree, capsys, name):
    whole = (tree / name).read_bytes()

    (tree / name).write_bytes(whole.removesuffix(b"\n"))
    assert generate.main(["--check"]) == 1
    (tree / name).write_bytes(whole + b"\n")
    assert generate.main(["--check"]) == 1
    assert "should be the end of the file" in capsys.readouterr().out
    (tree / name).unlink()
    assert generate.main(["--check"]) == 1
    assert f"{name}: missing" in capsys.readouterr().out


@pytest.mark.parametrize("role", ROLES)
def test_every_edited_row_changes_the_generated_files_or_is_refused(text, rows, role):
    committed, refusals = generate.render(text, {}, MODEL), []
    blocks = re.findall(rf'\[\[{role}\.row\]\]\nfrom = \[.*\]\ninput = "\w+"\nto = "\w+"\n', text)
    assert len({row[1] for row in rows[role]}) == len(blocks)

    for block in blocks:
        to = "ready" if 'to = "closed"' in block else "closed"
        edited = text.replace(block, re.sub(r'to = "\w+"', f'to = "{to}"', block))
        try:
            rendered = generate.render(edited, {}, MODEL)
        except generate.source.SpecError as error:
            refusals.append(str(error))
        else:
            assert all(
                rendered[name] != committed[name] for name in committed if name != "weightsync/protocol/_actions.py"
            )
    assert all(f"{role}.row" in refusal for refusal in refusals)


def test_a_readme_gets_the_generated_parts_that_it_has_markers_for(text):
    readme = "before\n<!-- generated: guarantees -->\nstale text\n<!-- /generated -->\nafter\n"

    filled = generate.render(text, {"README.md": readme}, MODEL)["README.md"]

    assert filled.startswith("before\n<!-- generated: guarantees -->\n\n| id |")
    assert filled.endswith("|\n\n<!-- /generated -->\nafter\n")
    assert "stale text" not in filled
    assert generate.render(text, {"README.md": filled}, MODEL)["README.md"] == filled


@pytest.mark.parametrize("role", ROLES)
def test_tables_tla_has_the_rows_of_protocol_toml(root, rows, role):
    module = (root / "tla/Tables.tla").read_text(encoding="utf-8")
    body = module.split(f"\n{role.capitalize()}Rows == {{")[1].split("}")[0]

    found = re.findall(r'<<"(\w+)", "(\w+)", "(\w+)">>', body)

    assert set(found) == rows[role]
    assert len(found) == len(rows[role])


@pytest.mark.parametrize("role", ROLES)
def test_the_diagram_in_protocol_md_has_the_rows_of_protocol_toml(document, rows, role):
    diagram = part(document, f"{role}-diagram")
    edges = re.findall(r"^    (\w+) --> (\w+) : ([\w, ]+) \((\w+)\)$", diagram, re.MULTILINE)

    found = [(source, name, target) for source, target, names, _ in edges for name in names.split(", ")]

    assert set(found) == rows[role]
    assert len(found) == len(rows[role])


@pytest.mark.parametrize("role", ROLES)
def test_the_table_in_protocol_md_has_the_rows_of_protocol_toml(document, rows, role):
    lines = part(document, f"{role}-rows").strip().splitlines()[2:]

    found = set()
    for line in lines:
        sources, name, target = (cell.strip().replace("`", "") for cell in line.strip("|").split("|"))
        found |= {(source, name, source if target == "same" else target) for source in sources.split(", ")}

    assert found == rows[role]


def test_every_generated_part_is_in_protocol_md(text, document):
    names = set(generate.docs.sections(generate.source.read(text)))

    assert set(re.findall(r"<!-- generated: (\S+) -->", document)) == names


def test_check_fails_if_an_action_is_renamed_in_the_model(tree, capsys):
    path = tree / "tla/AckProtocol.tla"
    path.write_text(path.read_text(encoding="utf-8").replace(": Defer(w)", ": PutOff(w)"), encoding="utf-8")

    assert generate.main(["--check"]) == 1
    assert "weightsync/protocol/_actions.py" in capsys.readouterr().out
