"""List the checks of a machine and its software, and run them."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llava_ds.extensions.doctor import collectives as collective
from llava_ds.extensions.doctor import machine, software
from llava_ds.extensions.doctor.requirements import PROBLEM, WARNING, Finding, Requirements


@dataclass(frozen=True)
class Check:
    """A named check and its function. needs_imports: True if it imports packages that may be broken."""

    name: str
    function: Callable[[Requirements], Iterator[Finding]]
    needs_imports: bool = True


CHECKS = (
    Check("python", software.check_python, needs_imports=False),
    Check("packages", software.check_packages, needs_imports=False),
    Check("limits", machine.check_limits, needs_imports=False),
    Check("shared memory", machine.check_shared_memory, needs_imports=False),
    Check("disks", machine.check_disks, needs_imports=False),
    Check("network", machine.check_network, needs_imports=False),
    Check("imports", software.check_imports, needs_imports=False),
    Check("configuration", software.check_configuration),
    Check("memory", machine.check_memory),
    Check("devices", machine.check_devices),
    Check("attention", software.check_attention),
    Check("compiler", software.check_compiler),
    Check("built operators", software.check_built_operators),
    Check("operators", software.check_operators),
    Check("nvme", machine.check_nvme),
    Check("backends", machine.check_backends),
    Check("collective", collective.check_collective),
)


def examine(required: Requirements, checks: tuple[Check, ...] = CHECKS) -> Iterator[tuple[str, Finding]]:
    """Yield each check's name and findings. If an import is broken, checks that need imports are skipped."""
    broken = False
    for check in checks:
        if broken and check.needs_imports:
            yield check.name, Finding(WARNING, "not checked, because an import fails")
            continue
        try:
            with contextlib.redirect_stdout(sys.stderr):  # libraries print when they are imported
                findings = list(check.function(required))
        except Exception as error:  # report it as a finding, and run the other checks
            remedy = f"look at {check.function.__module__}.{check.function.__name__}"
            findings = [Finding(PROBLEM, f"the check itself failed: {type(error).__name__}: {error}", remedy)]
        broken = broken or (check.name == "imports" and any(finding.level == PROBLEM for finding in findings))
        for finding in findings:
            yield check.name, finding


def as_lines(name: str, finding: Finding) -> list[str]:
    """Format a finding for printing: its level, check and text, and the remedy on a second line."""
    lines = [f"{finding.level:8} {name:16} {finding.found}"]
    return [*lines, f"{'':8} {'':16} -> {finding.remedy}"] if finding.remedy else lines
