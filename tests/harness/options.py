"""Options of saves and loads in the form that tests draw and send to children: flat, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import fastckpt

#: The names of the options in each record.
_RECORDS = {
    "io": {one.name for one in dataclasses.fields(fastckpt.IO)} - {"engine"},
    "files": {one.name for one in dataclasses.fields(fastckpt.Files)} - {"beside"},
    "registry": {"encode", "undeclared"},
    "ranks": {"process_group", "timeout", "replicas", "on_difference"},
}


def grouped(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same options in their records: ``io=``, ``files=``, ``registry=`` and ``ranks=``.

    Args:
        options: options by name; a whole record or its short form is accepted, too.
    """
    made = {name: value for name, value in options.items() if not any(name in known for known in _RECORDS.values())}
    for argument, known in _RECORDS.items():
        found = {name: value for name, value in options.items() if name in known}
        if found:
            made[argument] = _made(argument, made.get(argument), found)
    return made


def _made(argument: str, short: Any, found: dict[str, Any]) -> Any:
    if dataclasses.is_dataclass(short):
        return dataclasses.replace(short, **found)
    if argument == "registry":
        return fastckpt.Registry(**found)
    record: Any = {"io": fastckpt.IO, "files": fastckpt.Files}.get(argument)
    if record is None:
        # fastckpt.distributed imports torch.
        record = fastckpt.distributed.Ranks
    return record(**found) if short is None else record(short, **found)
