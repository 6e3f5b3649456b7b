"""What the tests of doors share."""

from __future__ import annotations

import pytest
import trainer_kills


@pytest.fixture(scope="session")
def libraries():
    """Makes groups of processes that have imported transformers, accelerate and Lightning."""
    with trainer_kills.forge() as forge:
        yield forge
