"""`weightsync doctor`: each probe finds a planted fault, and a scheme is rated as the worst probe that it needs."""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import json
import os
import resource
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import separate_outputs

from weightsync import cli
from weightsync.cli import _app, _limits, _probes, doctor
from weightsync.cli._app import build
from weightsync.cli._probes import Finding, Status
from weightsync.cli.doctor import NEEDS, PROBES, Diagnosis
from weightsync.model import ToolMissingError, toolchain
from weightsync.schemes import registry


def _refuse(number: int) -> Callable[..., object]:
    def refuse(*_: object) -> object:
        raise OSError(number, os.strerror(number))

    return refuse


def _no_folder() -> str:
    """Raise as `tempfile` does if no folder can be written to, or the disk is full."""
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/x']")


def _absent() -> Finding:
    return Finding(Status.ABSENT, "not installed", "install it")


def _no_java() -> object:
    raise ToolMissingError("install one (Debian: apt-get install default-jre-headless)")


def test_every_scheme_has_its_needs_and_every_need_a_probe() -> None:
    assert set(NEEDS) == set(registry._HOMES)
    assert {need for needs in NEEDS.values() for need in needs} <= set(PROBES)


def test_schemes_without_extras_work_on_this_machine_and_no_descriptor_is_left_open() -> None:
    before = set(os.listdir("/proc/self/fd"))

    found = Diagnosis({name: PROBES[name]() for name in PROBES if name not in ("Ray", "TorchRL")} | {"Ray": _absent()})

    assert found.scheme("shared") in (Status.WORKS, Status.LIMITED)
    assert found.scheme("process") in (Status.WORKS, Status.LIMITED)
    assert found.scheme("ray") is Status.ABSENT
    assert found.healthy
    assert len(os.listdir("/proc/self/fd")) <= len(before)


@pytest.mark.parametrize(
    ("probe", "planted", "status", "said"),
    [
        ("kernel", (os, "pidfd_open", _refuse(errno.ENOSYS)), Status.FAILS, "Linux 5.3"),
        ("segments", (os, "memfd_create", _refuse(errno.EPERM)), Status.FAILS, "seccomp"),
        ("descriptors", (resource, "getrlimit", lambda _: (256, 4096)), Status.LIMITED, "ulimit -n"),
        ("address_space", (resource, "getrlimit", lambda _: (1 << 30, 1 << 30)), Status.LIMITED, "ulimit -v unlimited"),
        (
            "shared_memory_size",
            (resource, "getrlimit", lambda _: (1 << 20, 1 << 20)),
            Status.LIMITED,
            "ulimit -f unlimited",
        ),
        ("processes", (resource, "getrlimit", lambda _: (200, 400)), Status.LIMITED, "ulimit -u 4096` (at most 400)"),
        ("pipes", (fcntl, "fcntl", lambda *_: 4096), Status.LIMITED, "fs.pipe-user-pages-soft"),
        (
            "engines",
            (_probes, "_is_installed", lambda _: False),
            Status.ABSENT,
            "needs neither for a server that it reaches by URL",
        ),
        ("temporary_files", (tempfile, "gettempdir", _no_folder), Status.FAILS, "set TMPDIR"),
        ("loopback", (socket, "create_server", _refuse(errno.EADDRNOTAVAIL)), Status.FAILS, "ip link set lo up"),
        ("java", (toolchain, "find_java", _no_java), Status.ABSENT, "default-jre"),
        ("shared_memory_size", (os, "access", lambda *_: False), Status.LIMITED, "Ray and your own queues"),
        ("ray", (os, "access", lambda *_: False), Status.FAILS, "Ray does not start"),
    ],
)
def test_each_planted_fault_is_found_with_its_status_and_remedy(
    monkeypatch: pytest.MonkeyPatch,
    probe: str,
    planted: tuple[object, str, object],
    status: Status,
    said: str,
) -> None:
    monkeypatch.setattr(_probes, "_version", lambda _: "9.9")  # so that Ray counts as installed
    monkeypatch.setattr(*planted)

    home = _limits if probe in vars(_limits) else _probes
    found: Finding = getattr(home, probe)()

    assert (found.status, said in found.remedy) == (status, True), found


def test_a_missing_folder_for_temporary_files_is_an_error_with_advice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build_none() -> object:
        return lambda **_: _no_folder()  # importing torch raises this, and so do the commands themselves

    monkeypatch.setattr(_app, "build", build_none)

    with pytest.raises(SystemExit) as ended:
        cli.main()

    assert ended.value.code == cli.FAILED
    assert capsys.readouterr().err == (
        f"weightsync: No usable temporary directory found in ['/tmp', '/x']. {cli.TEMPORARY_FILES}\n"
    )


def test_the_limit_of_locked_memory_matters_only_with_rdma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    without = _limits.locked_memory(tmp_path / "none")
    (tmp_path / "mlx5_0").mkdir()
    there = _limits.locked_memory(tmp_path)

    assert (without.status, there.status) == (Status.WORKS, Status.LIMITED)
    assert "8.0 MiB" in there.detail
    assert "ulimit -l unlimited" in there.remedy


def test_the_limits_of_a_container_are_found(tmp_path: Path) -> None:
    (tmp_path / "pids.max").write_text("100\n")
    (tmp_path / "memory.max").write_text(f"{3 << 30}\n")
    processes, memory = _limits.processes(tmp_path), _limits.shared_memory_size(tmp_path / "none", tmp_path)
    (tmp_path / "pids.max").write_text("max\n")

    assert (processes.status, processes.detail) == (Status.LIMITED, "100 processes and threads allowed")
    assert "--pids-limit" in processes.remedy
    assert (memory.status, "the container's 3.0 GiB" in memory.detail) == (Status.LIMITED, True)
    assert "tmpfs" in memory.remedy
    assert _limits.processes(tmp_path).status is Status.WORKS


@pytest.mark.parametrize(
    ("container", "found"),
    [
        (None, "; 8.0 GiB of memory available"),
        (16 << 30, "; 8.0 GiB of memory available"),
        (1 << 30, "; 1.0 GiB of memory available within the limit of the container (cgroup)"),
        (-1, "; 0.0 GiB of memory available within the limit of the container (cgroup)"),
    ],
)
def test_available_memory_is_capped_by_the_limit_of_the_container(
    monkeypatch: pytest.MonkeyPatch, container: int | None, found: str
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"MemFree: 1 kB\nMemAvailable: {8 << 20} kB\n")
    monkeypatch.setattr(_probes, "memory_left", lambda: container)

    assert _probes.segments().detail.endswith(found)


def test_a_small_shared_memory_file_system_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=64, f_frsize=1 << 20))
    found = _limits.shared_memory_size(tmp_path, tmp_path)

    assert (found.status, "--shm-size" in found.remedy) == (Status.LIMITED, True)
    assert found.detail == f"memfds as large as memory; 64.0 MiB free in {tmp_path}"


def test_a_broken_package_is_reported_and_the_other_probes_still_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> Finding:
        raise RuntimeError("this protobuf is too old")  # as importing Ray may raise

    works = dict.fromkeys(PROBES, lambda: Finding(Status.WORKS, "here"))
    monkeypatch.setattr(doctor, "PROBES", {**works, "Ray": broken})

    said = separate_outputs().invoke(build(), ["doctor", "--json"])

    record = json.loads(said.stdout)
    assert said.exit_code == 1
    assert [record["schemes"][scheme]["status"] for scheme in ("ray", "rpc")] == ["fails", "works"]
    assert "RuntimeError: this protobuf is too old" in record["findings"]["Ray"]["detail"]


def test_engines_that_are_installed_are_named_without_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_probes, "_is_installed", lambda name: name == "vllm")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")

    found = _probes.engines()

    assert (found.status, found.detail.split(";")[0]) == (Status.WORKS, "vllm 9.9")
    assert "vllm" not in sys.modules


def test_an_unresolved_or_slow_host_name_has_the_status_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unknown, answered = _probes.own_name(_refuse(errno.ENOENT)), threading.Event()
    monkeypatch.setattr(_probes, "_LOOKUP_S", 0.05)
    slow = _probes.own_name(lambda _: answered.wait(60))
    answered.set()

    assert [found.status for found in (unknown, slow)] == [Status.LIMITED] * 2
    assert "does not resolve" in unknown.detail
    assert "takes more than" in slow.detail
    assert "/etc/hosts" in slow.remedy


def test_a_missing_interface_for_gloo_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")

    found = _probes.torch_distributed()

    assert found.status is Status.FAILS
    assert "eth99" in found.detail
    assert "lo" in found.remedy


def test_a_scheme_has_the_worst_status_of_the_probes_that_it_needs() -> None:
    works = {name: Finding(Status.WORKS, "here") for name in PROBES}
    absent = Diagnosis({**works, "Ray": _absent(), "open files": Finding(Status.LIMITED, "256", "ulimit")})
    broken = Diagnosis({**works, "shared memory": Finding(Status.FAILS, "none", "allow it")})

    assert (absent.scheme("ray"), absent.reasons("ray")) == (Status.ABSENT, ["open files", "Ray"])
    assert (absent.scheme("process"), absent.healthy) == (Status.LIMITED, True)
    assert (broken.scheme("shared"), broken.scheme("process"), broken.healthy) == (Status.FAILS, Status.WORKS, False)


def test_the_exit_code_is_1_if_a_scheme_fails_and_json_has_all_findings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    probes = {name: (lambda: Finding(Status.WORKS, "here")) for name in PROBES}
    runner, file = separate_outputs(), tmp_path / "doctor.json"

    monkeypatch.setattr(doctor, "PROBES", probes)
    healthy = runner.invoke(build(), ["doctor", "--json", str(file)])
    monkeypatch.setattr(
        doctor, "PROBES", {**probes, "shared memory": lambda: Finding(Status.FAILS, "none", "allow it")}
    )
    broken = runner.invoke(build(), ["doctor", "--json", "-"])

    assert (healthy.exit_code, broken.exit_code) == (0, 1)
    assert json.loads(file.read_text())["healthy"] is True
    record = json.loads(broken.stdout)
    assert record["schemes"]["shared"] == {"status": "fails", "because": ["shared memory"]}
    assert record["findings"]["shared memory"] == {"status": "fails", "detail": "none", "remedy": "allow it"}
