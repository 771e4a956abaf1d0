"""A process without fxamp, in which the artifacts of all tests of this folder are loaded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fxamp.export.check import FreshProcess


@pytest.fixture(scope="session")
def fresh() -> Iterator[FreshProcess]:
    process = FreshProcess("cpu")
    yield process
    process.close()
