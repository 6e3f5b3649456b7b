"""The compiled module: its needs of the C library, as promised by its wheel's tag, and its hardening."""

from __future__ import annotations

import io
import re

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

#: The libraries of glibc itself. ld-linux is its loader.
LIBRARIES = re.compile(r"(libc|libm|libdl|librt|libpthread)\.so\.\d+|ld-linux-(x86-64|aarch64)\.so\.\d+")
#: Directories of the building machine, which messages of panics may contain.
PLACES = re.compile(rb"/(?:root|home|work|tmp|Users|build|builds|github|__w|runner)/[\w./-]*")
MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}


def problems(data: bytes, platform: str) -> list[str]:
    """Problems of a shared object of a wheel for `platform`, such as manylinux_2_27_x86_64: a line each."""
    tag = re.fullmatch(r"manylinux_(\d+)_(\d+)_(\w+)", platform)
    if not tag:
        return [f"the platform {platform} names no version of glibc"]
    try:
        elf = ELFFile(io.BytesIO(data))
    except ELFError as error:
        return [f"it is not a shared object: {error}"]
    return [
        *_machine(elf, tag[3]),
        *_symbols(elf, (int(tag[1]), int(tag[2]))),
        *_libraries(elf),
        *_hardening(elf),
        *_places(data),
    ]


def _places(data: bytes) -> list[str]:
    found = sorted({*PLACES.findall(data)})
    return [f"it names {len(found)} files of the building machine, such as {found[0].decode()}"] if found else []


def glibc(elf: ELFFile) -> tuple[int, int]:
    """The newest version of glibc whose symbols the object needs."""
    needed = [(0, 0)]
    for section in elf.iter_sections():
        if isinstance(section, GNUVerNeedSection):
            for _, versions in section.iter_versions():
                for version in versions:
                    found = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", version.name)
                    if found:
                        needed.append((int(found[1]), int(found[2])))
                    elif version.name.startswith("GLIBC_"):  # GLIBC_PRIVATE, GLIBC_ABI_DT_RELR: no tag promises these
                        needed.append((99, 0))
    return max(needed)


def _machine(elf: ELFFile, machine: str) -> list[str]:
    return [] if elf["e_machine"] == MACHINES.get(machine) else [f"it is for {elf['e_machine']}, the tag for {machine}"]


def _symbols(elf: ELFFile, promised: tuple[int, int]) -> list[str]:
    newest = glibc(elf)
    return [f"it needs a symbol of glibc {newest[0]}.{newest[1]}, newer than the tag"] if newest > promised else []


def _dynamic(elf: ELFFile) -> list:
    return [
        tag for section in elf.iter_sections() if isinstance(section, DynamicSection) for tag in section.iter_tags()
    ]


def _libraries(elf: ELFFile) -> list[str]:
    tags = _dynamic(elf)
    needed = [tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"]
    wrong = [f"it needs {name}, which is not glibc's" for name in needed if not LIBRARIES.fullmatch(name)]
    return wrong + [f"it has a {tag.entry.d_tag}" for tag in tags if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")]


def _hardening(elf: ELFFile) -> list[str]:
    segments = {segment["p_type"]: segment["p_flags"] for segment in elf.iter_segments()}
    flags = {tag.entry.d_tag: tag.entry.d_val for tag in _dynamic(elf)}
    wrong = []
    if segments.get("PT_GNU_STACK", 1) & 1:
        wrong.append("its stack is executable")
    if "PT_GNU_RELRO" not in segments:
        wrong.append("its relocations stay writable (no RELRO)")
    if not (flags.get("DT_FLAGS", 0) & 8 or flags.get("DT_FLAGS_1", 0) & 1 or "DT_BIND_NOW" in flags):
        wrong.append("its symbols are bound late, so that RELRO is partial (no BIND_NOW)")
    if elf.get_section_by_name(".symtab") or elf.get_section_by_name(".debug_info"):
        wrong.append("it is not stripped")
    return wrong
