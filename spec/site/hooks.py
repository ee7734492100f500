"""Hooks of the docs site for mkdocs: the project's own pages, the API reference, and links into the repository.

The pages outside `docs/` (README, CONTRIBUTING, ...) become pages of the site. A link to any other file, such as a test
or a module, is shown as its path, since the site does not know where the repository is published.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
#: Pages outside `docs/`, and their places on the site.
PROJECT = {
    "README.md": "project/README.md",
    "CONTRIBUTING.md": "project/CONTRIBUTING.md",
    "CHANGELOG.md": "project/CHANGELOG.md",
    "SECURITY.md": "project/SECURITY.md",
    "spec/README.md": "project/spec.md",
    "tla/README.md": "project/tla.md",
}
#: The pages of the API reference: title, and the public names on each.
REFERENCE = {
    "schemes": (
        "Schemes",
        (
            "WeightSyncScheme",
            "SharedMemWeightSyncScheme",
            "MultiProcessWeightSyncScheme",
            "RayWeightSyncScheme",
            "RayModuleTransformScheme",
            "RPCWeightSyncScheme",
            "DistributedWeightSyncScheme",
            "NoWeightSyncScheme",
            "WeightSyncActor",
            "register_weight_sync_backend",
            "WeightStrategy",
            "Layout",
            "RayModuleTransformSender",
            "RayModuleTransformReceiver",
            "TransportBackend",
            "InitialSyncTransport",
        ),
    ),
    "engines": (
        "Engines",
        (
            "EngineWeightSyncScheme",
            "VLLMEngine",
            "VLLMNCCLCarrier",
            "VLLMIPCCarrier",
            "SGLangEngine",
            "SGLangNCCLCarrier",
            "Engine",
            "Carrier",
        ),
    ),
    "sender": (
        "The trainer's side",
        ("WeightSender", "send_sharded", "OnFailure", "OnPending", "Verify", "WireDtype", "Timeout"),
    ),
    "receiver": ("The worker's side", ("WeightReceiver", "Loader")),
    "group": ("Worker groups", ("WorkerGroup", "run_worker", "Worker", "WorkerResult", "OnStale")),
    "reports": ("Reports", ("SyncReport", "Outcome", "OutcomeKind", "Evidence", "Delivery", "RefusalKind", "State")),
    "events": ("Events", ("SyncEvent", "EventKind", "SyncRole", "SyncPhase", "Subscription")),
    "telemetry": ("OpenTelemetry and Prometheus", ()),
    "errors": ("Errors", ()),
    "torchrl": (
        "TorchRL's names: collectors, engines, transports, updaters",
        (
            "MPTransport",
            "SharedMemTransport",
            "RayTransport",
            "RayActorTransport",
            "RPCTransport",
            "DistributedTransport",
            "NoTransport",
            "WeightUpdaterBase",
            "VanillaWeightUpdater",
            "MultiProcessedWeightUpdater",
            "RemoteModuleWeightUpdater",
            "RayWeightUpdater",
        ),
    ),
    "testing": ("Testing", ()),
}
_MODULES = {
    "errors": ("weightsync.errors",),
    "torchrl": tuple(
        f"weightsync.torchrl.{each}" for each in ("collectors", "llm.vllm", "llm.sglang", "llm.double_buffer")
    ),
    "telemetry": ("weightsync.telemetry.otel", "weightsync.telemetry.prometheus"),
    "testing": ("weightsync.testing",),
}
#: Pages that README names without links, since a package index shows README alone, where relative links would break.
_NAMED = re.compile(r"`((?:docs|spec|tla)/[\w/.-]+\.md|[A-Z]+\.md)`")
_LINK = re.compile(r"(\[[^\]]*\])\((?![a-z]+:)([^)#\s]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the project's pages and the API reference."""
    for source, place in PROJECT.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        text = _NAMED.sub(r"[\1](\1)", text) if source == "README.md" else text
        files.append(File.generated(config, place, content=_linked(text, source)))
    for name in REFERENCE:
        files.append(File.generated(config, f"reference/{name}.md", content=reference(name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links that leave `docs/` to their pages on the site."""
    source = page.file.src_uri
    return markdown if source.startswith(("project/", "reference/")) else _linked(markdown, f"docs/{source}")


def reference(name: str) -> str:
    """A page of the API reference, for mkdocstrings to fill."""
    title, names = REFERENCE[name]
    lines = [f"# {title}", ""]
    for module in _MODULES.get(name, ()):
        lines += [f"::: {module}", ""]
    return "\n".join([*lines, *(f"::: {_home(each)}\n" for each in names)])


def _home(name: str) -> str:
    import weightsync  # noqa: PLC0415 - only its table of homes

    return f"weightsync.{weightsync._HOMES[name]}.{name}"


def _linked(text: str, source: str) -> str:
    """The text of a repository file, with its links changed to those of the site."""

    def replaced(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        if not target:
            return match[0]
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        found = _place(place)
        if found is None:
            return f"{label[1:-1]} (`{place}`)" if place not in label else label[1:-1]
        here = posixpath.dirname(_place(source) or "")
        return f"{label}({posixpath.relpath(found, here or '.')}{anchor})"

    return _LINK.sub(replaced, text)


def _place(path: str) -> str | None:
    """The place of a repository file on the site. None: it is not on the site."""
    if path in PROJECT:
        return PROJECT[path]
    return path.removeprefix("docs/") if path.startswith("docs/") and path.endswith(".md") else None
