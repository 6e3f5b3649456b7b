"""The judgement: a pure function from facts to a diagnosis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastckpt._text import count, size

from . import Diagnosis, Finding, ring
from .measure import TELLING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_LEVELS = ("error", "warning", "note")
#: Bytes: with less free space, no model of a useful size fits.
_LITTLE_SPACE = 10**9
_FEW_INODES = 1000
_PAGE = 4096

#: By error: code, sentence and remedy. In a container, another remedy is often easier.
_TROUBLES = {
    "ENOENT": (
        "directory-missing",
        "the directory does not exist",
        "make it, so that a save there can be tried",
    ),
    "ENOTDIR": ("not-a-directory", "it is not a directory", "name the directory that holds the checkpoints"),
    "EACCES": ("not-writable", "this user may not write there", "change its owner or mode, or choose another"),
    "EPERM": ("not-writable", "writing there is not permitted", "see lsattr for an immutable flag, or choose another"),
    "EROFS": ("read-only", "the file system is mounted read-only", "mount it read-write, or choose another"),
    "ENOSPC": ("no-space", "the file system is full", "free space, or choose another"),
    "EDQUOT": (
        "quota",
        "the quota is used up",
        "free space or raise the quota (quota -s, lfs quota), or choose another",
    ),
}
#: By code: the remedy in each kind of container.
_IN_CONTAINERS = {
    "not-writable": {
        "docker": "docker run --user $(id -u):$(id -g) ... as the owner of the volume, or chown the volume's directory",
        "podman": "podman run --userns=keep-id ..., or -v DIR:/checkpoints:U",
        "kubernetes": "securityContext: {fsGroup: GID} on the pod, which gives the volume to that group",
    },
    "read-only": {
        "docker": "docker run -v /data/checkpoints:/checkpoints ... without :ro, and save there",
        "podman": "podman run -v /data/checkpoints:/checkpoints ... without :ro, and save there",
        "kubernetes": "save to a volume that is mounted without readOnly; with readOnlyRootFilesystem the rest is not "
        "writable",
    },
}


def diagnose(facts: Mapping[str, Any]) -> Diagnosis:
    """Judge the facts that :func:`facts.collect` gathered."""
    engine, why = _engine(facts)
    checks = (_directory, _ring, _choice, _direct, _place, _commit, _memory, _cores, _counters, _cuda, _measured)
    found = [finding for check in checks for finding in check(facts)]
    found.sort(key=lambda finding: _LEVELS.index(finding.level))
    levels = [finding.level for finding in found]
    where = facts["directory"]["path"]
    if "error" in levels:
        status, verdict = 2, f"cannot checkpoint in {where}: {found[0].text}"
    elif "warning" in levels:
        several = count(levels.count("warning"), "warning")
        status, verdict = 1, f"checkpoints work in {where}, but not as well as they could ({several}): {found[0].text}"
    else:
        status, verdict = 0, f"all well: checkpoints in {where} run on {engine}"
    return Diagnosis(status=status, verdict=verdict, engine=engine, why=why, findings=tuple(found), facts=facts)


def _engine(facts: Mapping[str, Any]) -> tuple[str, str]:
    """Return the engine that a save gets here, and why; an actual save takes precedence over the prediction."""
    asked, io = facts["engine"], facts["io"]
    chosen = "chosen by FASTCKPT_IO" if asked["requested"] != "auto" else "the best that works here"
    ran = (facts["measured"] or {}).get("save")
    if ran and ran["bytes"] >= TELLING:
        return ran["engine"], ran["fallback"] or chosen
    if asked["engine"] != "buffered" and io and not _takes_direct(io):
        refused = "direct I/O: refused by this file system"
        return "buffered", f"{asked['fallback']}; {refused}" if asked["fallback"] else refused
    return asked["engine"], asked["fallback"] or chosen


def _takes_direct(io: Mapping[str, Any]) -> bool:
    return bool(io["direct_used"]) and io["direct_write"] == "ok"


def _directory(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether the directory can be written, and the space left."""
    where = facts["directory"]
    trouble, free, inodes = where["trouble"], where["free_bytes"], where["free_inodes"]
    if trouble:
        other = f"cannot {trouble['operation']} it ({trouble['error']})"
        code, text, remedy = _TROUBLES.get(trouble["error"], ("directory-fails", other, "see what the error says"))
        if code == "no-space" and inodes == 0:
            code, text, remedy = "no-inodes", "the file system has no inodes left", "remove files, or choose another"
        evidence = (f"cannot {trouble['operation']} {where['path']}: {trouble['error']}",)
        remedies = {**_IN_CONTAINERS.get(code, {}), "any": remedy}
        yield Finding(code=code, level="error", text=text, evidence=evidence, remedies=remedies)
        return
    if free is not None and free < _LITTLE_SPACE:
        yield Finding(
            code="little-space",
            level="warning",
            text=f"{size(free)} are free",
            remedies={"any": "free space: while a checkpoint is replaced, both the old one and the new one are there"},
        )
    if inodes is not None and inodes < _FEW_INODES:
        text = f"{count(inodes, 'inode')} left"
        yield Finding(code="few-inodes", level="warning", text=text, remedies={"any": "remove files there"})


def _ring(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """The obstacle to io_uring, if it is wanted."""
    cause = ring.diagnose(facts)
    if cause and facts["engine"]["requested"] in ("auto", "uring"):
        yield cause
    memlock, process = facts["process"]["memlock"]["soft"], facts["process"]
    # A ring needs a few pages of locked memory, and each thread of each rank has one: 64 KiB suffice for about eight.
    if not cause and memlock is not None and memlock < 1 << 20 and not process["ipc_lock"]:
        yield Finding(
            code="little-memlock",
            level="note",
            text=f"RLIMIT_MEMLOCK is {memlock // 1024} KiB per user: enough for a few rings, not for one per rank",
            evidence=(f"RLIMIT_MEMLOCK: soft {memlock} bytes",),
            remedies=ring.MEMLOCK,
        )


def _choice(facts: Mapping[str, Any]) -> Iterator[Finding]:
    requested = facts["engine"]["requested"]
    if requested != "auto":
        yield Finding(
            code="engine-chosen",
            level="warning" if requested == "buffered" else "note",
            text=f"FASTCKPT_IO={requested} decides the engine",
            remedies={"any": "unset FASTCKPT_IO, unless that is what you want"},
        )


def _direct(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether direct I/O really bypasses the cache."""
    io, where = facts["io"], facts["directory"]
    if io is None or where["type"] in ("tmpfs", "ramfs"):
        return
    uncached = (
        "uncached buffered writes (RWF_DONTCACHE) work"
        if io["uncached"] == "ok"
        else (f"uncached buffered writes (RWF_DONTCACHE) are refused as well ({io['uncached']})")
    )
    elsewhere = "save to a file system with direct I/O (ext4, XFS, Lustre, NFS)"
    tried = next(
        (io[step] for step in ("direct_open", "direct_write", "direct_read") if io[step] not in ("ok", None)), None
    )
    if tried:
        yield Finding(
            code="direct-refused",
            level="warning",
            text=f"{where['type']} refuses direct I/O ({tried}): data goes through the page cache",
            evidence=(uncached,),
            remedies={"any": _under(where) or elsewhere},
        )
    elif not io["direct_used"]:
        alignment = (io["memory_alignment"], io["offset_alignment"])
        none = alignment == (0, 0)
        yield Finding(
            code="direct-refused" if none else "direct-alignment",
            level="warning",
            text="files here cannot do direct I/O (encrypted, journalled data or inline data)"
            if none
            else f"direct I/O here asks for an alignment above {_PAGE} bytes",
            evidence=(f"statx: memory alignment {alignment[0]}, offset alignment {alignment[1]}", uncached),
            remedies={"any": elsewhere},
        )
    elif io["direct_bypasses"] is False:
        yield Finding(
            code="direct-buffered",
            level="warning",
            text=f"{where['type']} accepts O_DIRECT, but writes through the page cache anyway",
            evidence=("cachestat sees the pages of a direct write in the cache", uncached),
            remedies={"any": _under(where) or elsewhere},
        )


def _under(where: Mapping[str, Any]) -> str | None:
    """Return the remedies for a file system that buffers."""
    kind = where["type"] or ""
    if kind == "btrfs":
        return (
            "btrfs buffers what it checksums: mkdir DIR && chattr +C DIR for a new directory without its checksums "
            "(fastckpt has its own), or save to ext4 or XFS"
        )
    return None


def _place(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether files that are written here persist."""
    where = facts["directory"]
    if where["type"] in ("tmpfs", "ramfs"):
        yield Finding(
            code="memory-file-system",
            level="warning",
            text=f"{where['type']} is in memory: nothing survives a reboot, and it counts against the memory limit",
            evidence=(f"{where['mount']} is {where['type']}",),
            remedies={"any": "save to a disk or a shared file system"},
        )
    # This is a container's own layer, or an overlay with another purpose.
    if where["type"] == "overlay":
        container = where["mount"] == "/" and facts["container"] in ("docker", "podman", "kubernetes")
        yield Finding(
            code="overlay",
            level="warning" if container else "note",
            text="this is overlayfs: a container's own layer is removed with the container",
            evidence=(f"{where['mount']} is overlay",),
            remedies={
                "docker": "docker run -v /data/checkpoints:/checkpoints ..., and save there",
                "podman": "podman run -v /data/checkpoints:/checkpoints ..., and save there",
                "kubernetes": "mount a PersistentVolumeClaim with volumeMounts, and save there",
                "host": "if it is a container's, save to a volume",
            },
        )

    if (where["type"] or "").startswith("fuse") and not where["network"]:
        source = where["source"] or ""
        below = source.startswith("/")
        yield Finding(
            code="fuse",
            level="warning" if below else "note",
            text=f"{where['type']}: every request passes through a process, and direct I/O ends there",
            evidence=(f"{where['mount']} is {where['type']} on {source or 'nothing'}",),
            remedies={"any": f"save to the file system below it ({source})" if below else "compare with other storage"},
        )


def _commit(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Features for a commit that the file system lacks; the commit works without them."""
    io = facts["io"]
    if io is None:
        return
    if io["rename_exchange"] != "ok":
        yield Finding(
            code="rename-flags",
            level="note",
            text="no atomic exchange of directories: a save over an existing checkpoint takes two renames, and the "
            "next load or save puts the old one back after a crash between them",
            evidence=(f"renameat2(RENAME_EXCHANGE): {io['rename_exchange']}",),
            remedies={"any": "a new name for each step needs no exchange"},
        )
    if io["lock"] != "ok" or io["lock_reach"] == "unknown":
        yield Finding(
            code="no-locks",
            level="note",
            text="locks here are not known to be visible to other machines and containers: the leftovers of a killed "
            "save are removed only by processes that can see that it has ended",
            evidence=(f"lock on a file: {io['lock']}", f"seen by: {io['lock_reach']}"),
            remedies={
                "any": "fastckpt clean DIR --yes --older-than TIME; Lustre: mount with -o flock; NFS: without "
                "nolock and local_lock"
            },
        )
    if io["fallocate"] != "ok":
        yield Finding(
            code="no-fallocate",
            level="note",
            text="space cannot be reserved: a full file system is noticed while writing, not before",
            evidence=(f"fallocate: {io['fallocate']}",),
        )


def _memory(facts: Mapping[str, Any]) -> Iterator[Finding]:
    memory = facts["memory"]
    if memory["transparent_huge_pages"] == "never" or memory["huge_pages"] != "ok":
        yield Finding(
            code="no-huge-pages",
            level="warning",
            text="no huge pages for staging: requests break into small ones and cost more CPU",
            evidence=(
                f"/sys/kernel/mm/transparent_hugepage/enabled: {memory['transparent_huge_pages']}",
                f"madvise(MADV_HUGEPAGE): {memory['huge_pages']}",
            ),
            remedies={"any": "on the host: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"},
        )
    if memory["populate"] != "ok":
        yield Finding(
            code="no-populate",
            level="note",
            text="memory is populated page by page (Linux 5.14 does it in one call)",
            evidence=(f"madvise(MADV_POPULATE_WRITE): {memory['populate']}",),
        )
    available, needed = memory["available_bytes"], 2 * memory["staging_bytes"]
    if available is not None and available < needed:
        yield Finding(
            code="little-memory",
            level="warning",
            text=f"{size(available)} of memory left; a save takes up to {size(memory['staging_bytes'])} for staging",
            evidence=(f"limit of the control group: {_bytes(memory['cgroup_limit_bytes'])}",),
            remedies={
                "docker": "docker run --memory=... with more",
                "podman": "podman run --memory=... with more",
                "kubernetes": "raise resources.limits.memory",
                "any": "give the job more memory, or save with io=IO(threads=1)",
            },
        )


_MORE_CORES = {
    "kubernetes": "raise resources.limits.cpu",
    "docker": "docker run --cpus=... with more",
    "podman": "podman run --cpus=... with more",
    "slurm": "srun --cpus-per-task=... with more",
    "any": "give the job more cores",
}


def _cores(facts: Mapping[str, Any]) -> Iterator[Finding]:
    cpu = facts["cpu"]
    ranks, usable = cpu["local_world_size"] or 1, min(cpu["affinity"], cpu["quota"] or cpu["affinity"])
    evidence = (
        f"{cpu['online']} online, {cpu['affinity']} in the affinity mask",
        f"quota {cpu['quota'] or 'none'}, LOCAL_WORLD_SIZE {cpu['local_world_size'] or 'unset'}",
    )
    # Under torchrun with bound ranks the mask is that of one rank, otherwise that of all ranks.
    if usable < 1 or ranks > cpu["affinity"]:
        text = f"less than one core a process: {usable:g} for {count(ranks, 'rank')}"
        yield Finding(code="few-cores", level="warning", text=text, evidence=evidence, remedies=_MORE_CORES)
    elif cpu["cores"] == 1:
        text = "one core for this process: copying and checksums share it with the training"
        yield Finding(code="one-core", level="note", text=text, evidence=evidence, remedies=_MORE_CORES)


def _counters(facts: Mapping[str, Any]) -> Iterator[Finding]:
    where = facts["counters"]
    full = where["free_bytes"] is not None and where["free_bytes"] < where["needed_bytes"]
    if where["off"] or (where["writable"] and not full):
        return
    why = where["refused"] or f"{where['directory']} is {'full' if full else 'not writable'}"
    yield Finding(
        code="no-counters",
        level="note",
        text=f"no room for the live counters: fastckpt-top will not see this process ({why})",
        remedies={
            "docker": "docker run --shm-size=1g ...",
            "podman": "podman run --shm-size=1g ...",
            "kubernetes": "mount an emptyDir with medium: Memory at /dev/shm",
            "any": "set FASTCKPT_TOP_DIR to a local directory that can be written, best on a tmpfs",
        },
    )


def _cuda(facts: Mapping[str, Any]) -> Iterator[Finding]:
    cuda, versions = facts["cuda"], facts["versions"]
    if cuda["devices"] and versions["torch"] and not versions["torch_cuda"]:
        yield Finding(
            code="torch-without-cuda",
            level="note",
            text=f"{count(cuda['devices'], 'GPU')} here, but torch {versions['torch']} is built without CUDA",
            remedies={"any": "install a CUDA build of torch"},
        )


def _measured(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether the trial save and load succeeded."""
    measured = facts["measured"]
    if measured and measured["error"]:
        failed = not measured["error"].startswith("not measured")
        yield Finding(
            code="trial-failed" if failed else "not-measured",
            level="error" if failed else "note",
            text=f"a trial save and load failed: {measured['error']}" if failed else measured["error"],
        )


def _bytes(number: int | None) -> str:
    return "none" if number is None else size(number)
