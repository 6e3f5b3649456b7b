"""docs/migrate/formats.md: which reader reads which checkpoint, tested with the libraries."""

from __future__ import annotations

import formats

from harness import pages


def test_the_table_is_what_the_libraries_do(libraries, tmp_path):
    (shown,) = formats.PLACE.findall(pages.text(formats.PAGE))
    assert shown == formats.table(libraries, tmp_path)
