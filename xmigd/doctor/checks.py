"""All checks, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from xmigd.doctor import gpu, installation, machine, tools
from xmigd.doctor.system import Finding, System
from xmigd.settings import Settings

Check = Callable[[System, Settings], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    machine.kernel, machine.descriptors, machine.locked_memory, machine.shared_memory, machine.huge_pages,
    machine.ptrace, machine.service_manager, gpu.driver, gpu.devices, tools.criu, tools.compiler,
    installation.native, installation.runtime_directory, installation.database, installation.disk,
    installation.daemon,
)  # fmt: skip


def examine(system: System, settings: Settings) -> list[Finding]:
    """Every finding. A check that fails itself is a finding, too."""
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings += check(system, settings)
        except Exception as error:
            name = check.__name__.replace("_", " ")
            findings.append(Finding(name, "warning", f"could not be checked: {type(error).__name__}: {error}",
                                    "report this; the other checks are not affected"))  # fmt: skip
    return findings
