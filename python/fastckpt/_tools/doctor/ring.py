"""Why io_uring is not available: the single cause, only from the facts.

A seccomp filter refuses calls before the kernel runs them, usually all three of io_uring. Without a ring, the kernel
fails ``io_uring_enter`` and ``io_uring_register`` with ``EBADF`` or ``EINVAL``, whatever its settings. So any other
error of these two proves that a filter exists. If only ``io_uring_setup`` is refused, the settings decide.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from . import Finding

#: Code, sentence, remedies and evidence.
Cause: TypeAlias = tuple[str, str, Mapping[str, str], list[str]]

_CALLS = ("io_uring_setup", "io_uring_enter", "io_uring_register")
_ENTRY = '{"names": ["' + '", "'.join(_CALLS) + '"], "action": "SCMP_ACT_ALLOW"}'
_DOCKER_PROFILE = "https://raw.githubusercontent.com/moby/profiles/main/seccomp/default.json"
_REFUSALS = ("EPERM", "EACCES", "ENOSYS")

SECCOMP = {
    "docker": (
        f"docker run --security-opt seccomp=fastckpt.json --ulimit memlock=-1 ..., where fastckpt.json is Docker's "
        f'default profile with one more entry in "syscalls":\n'
        f"curl -sSL {_DOCKER_PROFILE} | jq '.syscalls += [{_ENTRY}]' > fastckpt.json\n"
        f"docs/seccomp.json in fastckpt's sources is a whole profile (docs/containers.md)\n"
        f"To try it: --security-opt seccomp=unconfined"
    ),
    "podman": (
        f"podman run --security-opt seccomp=fastckpt.json --ulimit memlock=-1:-1 ..., made from the default profile:\n"
        f"jq '.syscalls += [{_ENTRY}]' /usr/share/containers/seccomp.json > fastckpt.json"
    ),
    "kubernetes": (
        "put docs/seccomp.json of fastckpt's sources (docs/containers.md), or your runtime's profile with this entry "
        'in "syscalls", on every node as '
        f"/var/lib/kubelet/seccomp/profiles/fastckpt.json:\n{_ENTRY}\nand name it in the pod:\n"
        "securityContext: {seccompProfile: {type: Localhost, localhostProfile: profiles/fastckpt.json}}\n"
        "To try it: seccompProfile: {type: Unconfined}"
    ),
    "host": (
        f"allow {', '.join(_CALLS)} in whatever started this process; in a systemd unit: "
        f"SystemCallFilter={' '.join(_CALLS)}"
    ),
}
_SYSCTL = {
    "docker": "on the host, not in the container: sysctl -w kernel.io_uring_disabled=0",
    "podman": "on the host, not in the container: sysctl -w kernel.io_uring_disabled=0",
    "kubernetes": (
        "on every node (the setting has no namespace, so securityContext.sysctls cannot hold it): "
        "sysctl -w kernel.io_uring_disabled=0, in the node's image or by a privileged DaemonSet"
    ),
    "host": (
        "sysctl -w kernel.io_uring_disabled=0, and for the next boot: "
        "echo kernel.io_uring_disabled=0 > /etc/sysctl.d/60-io_uring.conf"
    ),
}
_GROUP = "; or leave it at 1 and let a group of this user's have it: sysctl -w kernel.io_uring_group=GID"
MEMLOCK = {
    "docker": "docker run --ulimit memlock=-1 ...; in compose: ulimits: {memlock: -1}",
    "podman": "podman run --ulimit memlock=-1:-1 ...",
    "kubernetes": (
        "a pod cannot set it: on every node give the runtime more (systemctl edit containerd: [Service] "
        'LimitMEMLOCK=infinity; CRI-O: default_ulimits = ["memlock=-1:-1"]), or in a container that runs as root: '
        'securityContext: {capabilities: {add: ["IPC_LOCK"]}}'
    ),
    "slurm": ("PropagateResourceLimitsExcept=MEMLOCK in slurm.conf, and LimitMEMLOCK=infinity in the unit of slurmd"),
    "host": (
        "ulimit -l unlimited before the program starts; if that is refused: echo '* - memlock unlimited' > "
        "/etc/security/limits.d/60-memlock.conf and log in anew; in a systemd unit: LimitMEMLOCK=infinity"
    ),
}
_SELINUX = {
    "docker": "docker run --security-opt label=disable ..., or a policy module as below",
    "podman": "podman run --security-opt label=disable ..., or a policy module as below",
    "any": "ausearch -m AVC -ts recent | audit2allow -M fastckpt && semodule -i fastckpt.pp",
}


def diagnose(facts: Mapping[str, Any]) -> Finding | None:
    """Return the obstacle to a ring, or None if a save has one."""
    ring, process = facts["io_uring"], facts["process"]
    answer = ring["answer"]
    if answer == "ok":
        if ring["enter"] not in _REFUSALS:
            return None
        answer = ring["enter"]
    code, text, remedies, more = _cause(answer, facts)
    says = f"io_uring_setup answers {ring['setup']}, io_uring_enter {ring['enter']}, io_uring_register "
    evidence = [f"{says}{ring['register']}", *more]
    evidence.append(f"/proc/self/status: Seccomp {process['seccomp']}{_filters(process)}")
    if ring["disabled"] is not None:
        evidence.append(f"kernel.io_uring_disabled is {ring['disabled']}")
    if code == "io_uring-seccomp" and _disabled(facts):
        text += "; and without the filter kernel.io_uring_disabled would refuse io_uring, so change both"
        remedies = {place: f"{remedy}\n{_SYSCTL.get(place, '')}".strip() for place, remedy in remedies.items()}
    return Finding(code=code, level="warning", text=text, evidence=tuple(evidence), remedies=remedies)


def _cause(answer: str, facts: Mapping[str, Any]) -> Cause:  # noqa: PLR0911 - one for each cause
    """Return code, sentence, remedies and evidence for a ring refused with ``answer``."""
    process = facts["process"]
    if facts["kernel"]["sandbox"] == "gvisor":
        text = "gVisor has no io_uring"
        return (
            "io_uring-gvisor",
            text,
            {"any": "none needed: the engine threads works; for io_uring use another runtime class"},
            [],
        )
    if answer in _REFUSALS:
        return _refused(answer, facts)
    if answer == "ENOMEM":
        limit = process["memlock"]["soft"]
        if limit is not None and not process["ipc_lock"]:
            text = f"locked memory (RLIMIT_MEMLOCK, {limit // 1024} KiB for all processes of this user) is used up"
            hard = process["memlock"]["hard"]
            return (
                "io_uring-memlock",
                text,
                MEMLOCK,
                [
                    f"RLIMIT_MEMLOCK: soft {limit} bytes, hard {'unlimited' if hard is None else f'{hard} bytes'}",
                    "no CAP_IPC_LOCK, which would lift it",
                ],
            )
        return (
            "io_uring-memory",
            "no memory for a ring",
            {"any": "give the process or its control group more memory"},
            [
                "RLIMIT_MEMLOCK does not apply here",
            ],
        )
    if answer in ("EMFILE", "ENFILE"):
        text = f"too many open files for a ring (limit {process['open_files']['soft']})"
        return "io_uring-files", text, {"any": "ulimit -n 65536; Docker: --ulimit nofile=65536"}, []
    if answer == "EINVAL":
        text = f"the io_uring of this kernel ({facts['kernel']['release']}) is too old"
        return "io_uring-old", text, {"any": "Linux 5.6 or newer"}, []
    return "io_uring-unknown", f"io_uring is refused with {answer}", {}, []


def _refused(answer: str, facts: Mapping[str, Any]) -> Cause:  # noqa: PLR0911 - one for each cause
    """Distinguish a filter, a setting, a security module and a kernel without io_uring."""
    ring, process, release = facts["io_uring"], facts["process"], facts["kernel"]["release"]
    filtered = process["seccomp"] == 2  # noqa: PLR2004 - SECCOMP_MODE_FILTER
    proved = any(ring[call] in _REFUSALS for call in ("enter", "register"))
    seccomp = "io_uring-seccomp", f"a seccomp filter hides io_uring ({answer}): {_whose(answer, facts)}", SECCOMP
    if answer == "ENOSYS":
        if ring["setup"] == "ok" and ring["register"] not in _REFUSALS:
            text = f"the io_uring of this kernel ({release}) is too old"
            return "io_uring-old", text, {"any": "Linux 5.6 or newer"}, []
        if filtered and not proved:
            return *seccomp, ["the kernel knows io_uring_enter, so it has io_uring"]
        if filtered and (ring["configured"] or ring["disabled"] is not None):
            return *seccomp, ["this kernel was built with io_uring"]
        if filtered and ring["configured"] is None and _should_have(release):
            return *seccomp, [f"Linux {release} should have io_uring; its configuration is unknown"]
        text = f"this kernel ({release}) has no io_uring"
        return "io_uring-missing", text, {"any": "a kernel built with CONFIG_IO_URING (RHEL: 9.3 or newer)"}, []
    if filtered and proved:
        return *seccomp, ["the kernel itself would fail the last two with EBADF or EINVAL"]
    if answer == "EPERM" and _disabled(facts):
        everybody = ring["disabled"] == 2  # noqa: PLR2004 - the sysctl's "for everybody"
        text = f"kernel.io_uring_disabled={ring['disabled']} refuses io_uring to "
        text += "everybody" if everybody else "users outside kernel.io_uring_group"
        remedies = _SYSCTL if everybody else {place: remedy + _GROUP for place, remedy in _SYSCTL.items()}
        return "io_uring-sysctl", text, remedies, []
    selinux = (process["lsm"] or "").startswith("selinux")
    if selinux and (answer == "EACCES" or not filtered):
        return "io_uring-selinux", "SELinux refuses io_uring", _SELINUX, [f"enforcing: {process['lsm']}"]
    if filtered:
        return *seccomp, ["no setting of the kernel's refuses it"]
    name = process["lsm"] or "an unknown security module"
    text = f"{name} refuses io_uring ({answer})"
    return (
        "io_uring-lsm",
        text,
        {"any": "ask the administrator; the kernel's log (dmesg) may name it"},
        [],
    )


def _disabled(facts: Mapping[str, Any]) -> bool:
    """Whether the setting refuses this process, as the kernel's io_uring_allowed() decides."""
    ring, process = facts["io_uring"], facts["process"]
    if ring["disabled"] == 1:
        return not (process["sys_admin"] or ring["group"] in process["groups"])
    return bool(ring["disabled"] == 2)  # noqa: PLR2004 - for everybody


def _should_have(release: str) -> bool:
    """Whether a kernel of this release usually has io_uring (Linux 5.1; RHEL 8 and early 9 lack it)."""
    version = re.match(r"(\d+)\.(\d+)", release)
    return version is not None and (int(version[1]), int(version[2])) >= (5, 1) and not re.search(r"\.el[89]", release)


def _whose(answer: str, facts: Mapping[str, Any]) -> str:
    """Return the probable owner of the filter."""
    known = {
        ("docker", "EPERM"): "Docker's default profile, since 25.0",
        ("podman", "ENOSYS"): "Podman's default profile",
        ("kubernetes", "EPERM"): "containerd's default profile, since 2.0 (seccompProfile: RuntimeDefault)",
        ("kubernetes", "ENOSYS"): "CRI-O's default profile (seccompProfile: RuntimeDefault)",
    }
    style = "as Podman and CRI-O do by default" if answer == "ENOSYS" else "as Docker and containerd do by default"
    return known.get((facts["container"], answer), style)


def _filters(process: Mapping[str, Any]) -> str:
    return "" if process["seccomp_filters"] is None else f", Seccomp_filters {process['seccomp_filters']}"
