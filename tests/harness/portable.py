"""Makes fastckpt in this process read with the portable reader, as on a laptop, and save with the compiled core.

``FASTCKPT_TEST_PORTABLE=1 PYTHONPATH=tests python -m pytest -p harness.portable tests/...`` runs tests in this way.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ExtensionFileLoader, SourceFileLoader
from pathlib import Path

NAME = "fastckpt._core"
#: Tests of features that only the compiled core has, by feature.
OTHERS = {
    "keeps shards open": (
        "test_an_open_checkpoint_stays_readable",
        "test_an_open_checkpoint_leaves_no_descriptors",
        "test_a_forked_child_opens_its_own_shards",
    ),
    "reads a manifest in twice its bytes": ("test_the_core_takes_no_more_than_twice_the_file",),
    "has several engines": ("test_a_load_gives_its_report",),
    "reads several blocks of an object by one request": (
        "test_small_ranges_are_read_together_and_large_ones_in_parts",
        "test_no_more_than_so_much_is_on_its_way",
    ),
    "takes the addresses that the store's files return": ("test_an_address_of_nothing_is_an_answer_of_nothing",),
    "writes": (
        "test_the_states_of_ranks",
        "test_the_command_line",
        "test_fallback_is_a_warning_once",
        "test_a_lazy_save_notices_a_change_of_what_it_casts",
        "test_a_look_at_a_target_makes_no_parents",
    ),
    "is what an interpreter of its own imports, and was tried with it": (
        "test_framework_numpy_needs_no_torch",
        "test_without_a_descriptor_to_spare_a_checkpoint_opens_all_the_same",
        "test_when_the_interpreter_ends",
        "test_an_option_is_added_in_one_file",
        "test_a_load_in_a_tight_group_is_an_error_and_no_kill",
        "test_debug_build_warns_once",
        "test_a_locale_without_the_characters_is_no_traceback",
    ),
}


class Finder:
    """Finds the Python module in place of the compiled core, as if the core were missing."""

    @staticmethod
    def find_spec(name, path, _target=None):
        return spec_of(SourceFileLoader, Path(path[0], "_core.py")) if name == NAME else None


def spec_of(loader, path):
    return importlib.util.spec_from_file_location(NAME, path, loader=loader(NAME, str(path)))


def install():
    if NAME in sys.modules:
        raise AssertionError("fastckpt was imported too early")
    sys.meta_path.insert(0, Finder)
    import fastckpt
    from fastckpt._api import save_settings, single_process

    (compiled,) = Path(fastckpt.__file__).parent.glob("_core*.so")
    spec = spec_of(ExtensionFileLoader, compiled)
    single_process._core = save_settings._core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(single_process._core)
    assert fastckpt._core.__file__.endswith("_core.py")


def pytest_collection_modifyitems(config, items):
    names = {name for some in OTHERS.values() for name in some}
    others = [item for item in items if getattr(item, "originalname", None) in names]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


install()
