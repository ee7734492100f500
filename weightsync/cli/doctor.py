"""``weightsync doctor``: which schemes work on this machine, and what to do about the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import typer
from rich.table import Table

from weightsync.cli import _limits, _probes
from weightsync.cli._app import Report, console, write_report
from weightsync.cli._probes import Finding, Status

#: The exit code if a scheme that every installation has does not work.
DOES_NOT_WORK = 1
_STYLES = {Status.WORKS: "green", Status.LIMITED: "yellow", Status.FAILS: "bold red", Status.ABSENT: "dim"}

PROBES = {
    "operating system": _probes.kernel,
    "shared memory": _probes.segments,
    "shared memory size": _limits.shared_memory_size,
    "address space": _limits.address_space,
    "locked memory": _limits.locked_memory,
    "open files": _probes.descriptors,
    "processes": _limits.processes,
    "pipes": _limits.pipes,
    "temporary files": _limits.temporary_files,
    "loopback": _probes.loopback,
    "host name": _probes.own_name,
    "torch.distributed": _probes.torch_distributed,
    "RPC": _probes.torch_rpc,
    "Ray": _probes.ray,
    "TorchRL": _probes.torchrl,
    "engines": _probes.engines,
    "CUDA": _probes.cuda,
    "Java": _probes.java,
}

_ANY_PROCESS = ("operating system", "open files", "processes", "address space", "temporary files")
_OVER_TCP = (*_ANY_PROCESS, "loopback", "host name")
#: What each scheme needs, by its backend.
NEEDS = {
    "none": ("temporary files",),
    "shared": (*_ANY_PROCESS, "shared memory", "shared memory size"),
    "process": (*_ANY_PROCESS, "pipes"),
    "distributed": (*_OVER_TCP, "torch.distributed"),
    "rpc": (*_OVER_TCP, "RPC"),
    "ray": (*_OVER_TCP, "Ray"),
}
#: From harmless to fatal: a scheme is as good as the worst of what it needs.
_SEVERITY = (Status.WORKS, Status.LIMITED, Status.ABSENT, Status.FAILS)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found on this machine.

    Attributes:
        findings: the result of each probe, by its name.
    """

    findings: Mapping[str, Finding]

    def scheme(self, backend: str) -> Status:
        """Whether a scheme works here."""
        return max((self.findings[need].status for need in NEEDS[backend]), key=_SEVERITY.index, default=Status.WORKS)

    def reasons(self, backend: str) -> list[str]:
        """The names of the probes because of which a scheme does not work, or not well."""
        return [need for need in NEEDS[backend] if self.findings[need].status is not Status.WORKS]

    @property
    def healthy(self) -> bool:
        """Whether every scheme works whose packages are installed."""
        return all(self.scheme(backend) is not Status.FAILS for backend in NEEDS)

    def record(self) -> dict[str, Any]:
        """The diagnosis as plain data, for JSON."""
        return {
            "packages": _probes.packages(),
            "healthy": self.healthy,
            "schemes": {
                backend: {"status": self.scheme(backend).value, "because": self.reasons(backend)} for backend in NEEDS
            },
            "findings": {
                name: {"status": finding.status.value, "detail": finding.detail, "remedy": finding.remedy}
                for name, finding in self.findings.items()
            },
        }


def doctor(
    report: Report = None,
) -> None:
    """Say which schemes work on this machine, and what to do about the others.

    The exit code is 0 if every scheme works whose packages are installed, and 1 if one does not.
    """
    screen = console(report)
    found = Diagnosis({name: probed(probe) for name, probe in PROBES.items()})
    write_report(found.record(), report)
    screen.print(_probes.packages(), markup=False, highlight=False)
    screen.print()
    screen.print(schemes(found))
    screen.print()
    screen.print(findings(found))
    for name, finding in found.findings.items():
        if finding.remedy:
            screen.print(f"\n{name}: {finding.detail}.\n  {finding.remedy}", markup=False, highlight=False)
    if not found.healthy:
        raise typer.Exit(DOES_NOT_WORK)


def probed(probe: Callable[[], Finding]) -> Finding:
    """The result of a probe, also where a package is installed and broken: importing it may raise anything."""
    try:
        return probe()
    except Exception as error:  # noqa: BLE001
        return Finding(
            Status.FAILS,
            f"it is installed, and cannot be used: {type(error).__name__}: {error}",
            "Reinstall the package of this name, or uninstall it; `pip check` names packages that do not fit.",
        )


def schemes(found: Diagnosis) -> Table:
    """Return the table of schemes."""
    table = Table("scheme", "status", "because of", box=None, pad_edge=False)
    for backend in NEEDS:
        status = found.scheme(backend)
        table.add_row(backend, f"[{_STYLES[status]}]{status.value}[/]", ", ".join(found.reasons(backend)))
    return table


def findings(found: Diagnosis) -> Table:
    """Return the table of probes."""
    table = Table("checked", "status", "found", box=None, pad_edge=False)
    for name, finding in found.findings.items():
        table.add_row(name, f"[{_STYLES[finding.status]}]{finding.status.value}[/]", finding.detail)
    return table
