"""Every model of the zoo is eager autocast, bit for bit, in both modes."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from functools import cache

import pytest

from tests.zoo.check import check
from tests.zoo.entry import LIBRARIES, Entry, entries


@pytest.fixture(autouse=True)
def _freed() -> Iterator[None]:
    yield
    gc.collect()


@cache
def _listed(library: str) -> tuple[Entry, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries, when they are imported
        pytest.importorskip(LIBRARIES[library], reason=f"{library} is not installed")
        return entries(library)


def _assert_equal(entry: Entry, mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries, about what their models do
        result = check(entry, mode)
    if result.status in ("eager fails", "build fails"):
        pytest.skip(f"{result.status}: {result.error}")
    assert result.status == "equal", f"{result.differs}\n{result.error}"


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("library", [name for name in LIBRARIES if name != "smp"])  # all take seconds
def test_a_handful_is_eager_autocast(library: str, mode: str) -> None:
    for entry in _listed(library):
        if entry.fast:
            _assert_equal(entry, mode)


@pytest.mark.slow
@pytest.mark.zoo
@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_every_model_is_eager_autocast(library: str, mode: str, subtests: pytest.Subtests) -> None:
    for entry in _listed(library):
        if mode in entry.modes and not entry.fast:
            with subtests.test(entry.name):
                _assert_equal(entry, mode)
