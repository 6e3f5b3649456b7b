"""The public API as text: ``PYTHONPATH=tests python -m harness.surface > tests/api/surface.txt`` writes it anew."""

import dataclasses
import importlib
import inspect
import re
import types

import fastckpt


def public(module):
    """The public names of a module of fastckpt, and their objects."""
    names = dir(module) if module is fastckpt else module.__all__
    return {name: getattr(module, name) for name in sorted(names) if not name.startswith("_")}


def signature(function):
    """The parameters and defaults of a function, without types, which other tests check."""
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return "(...)"
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in found.parameters.values()]
    text = str(found.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def members(kind):
    """The lines of a class: its fields, properties and methods, and those of its bases in fastckpt."""
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    fields |= set(getattr(kind, "_fields", ()))
    for name in sorted({*fields, *(name for name in dir(kind) if not name.startswith("_"))}):
        found = inspect.getattr_static(kind, name, None)
        ours = any(name in vars(base) and base.__module__.startswith("fastckpt") for base in kind.__mro__)
        attribute = isinstance(found, (property, types.MemberDescriptorType, types.GetSetDescriptorType, str))
        if name in fields or (ours and attribute):
            yield f"    {name}"
        elif ours and callable(getattr(kind, name)):
            yield f"    {name}{signature(getattr(kind, name))}"


def modules():
    """The package and its public modules, by their full names."""
    found = {"fastckpt": fastckpt}
    for name in (*public(fastckpt), *(f"integrations.{name}" for name in fastckpt.integrations.__all__)):
        if name.startswith("integrations.") or isinstance(getattr(fastckpt, name), types.ModuleType):
            found[f"fastckpt.{name}"] = importlib.import_module(f"fastckpt.{name}")
    return found


def lines():
    """The lines of the package and of each of its public modules."""
    for where, module in modules().items():
        yield f"{where}:"
        for name, found in public(module).items():
            if isinstance(found, types.ModuleType):
                yield f"  {name}: a module"
            elif module is not fastckpt and getattr(fastckpt, name, None) is found:
                yield f"  {name}: as fastckpt.{name}"
            elif inspect.isclass(found):
                # Classes that users may construct document their arguments; the others are returned.
                yield f"  class {name}{signature(found) if 'Args:' in (found.__doc__ or '') else ''}"
                yield from members(found)
            elif callable(found):
                yield f"  {name}{signature(found)}"
            else:
                yield f"  {name}"


def documented():
    """Each public function, and each class that documents arguments, with its full name."""
    for module in modules().values():
        for name, found in public(module).items():
            if inspect.isfunction(found) or (inspect.isclass(found) and "Args:" in (found.__doc__ or "")):
                yield f"{module.__name__}.{name}", found


def text():
    """The text of the whole public API."""
    return "\n".join(lines()) + "\n"


if __name__ == "__main__":
    print(text(), end="")
