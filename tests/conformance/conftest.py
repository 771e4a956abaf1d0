"""What the sweeps counted, shown at the end of the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch

_LINES = pytest.StashKey[list[str]]()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """The tensors are tiny: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def _no_trace_log() -> Iterator[None]:
    """Spare torch the stack traces that it would write for each symbolic size, into pytest's log."""
    with mock.patch.object(logging.getLogger("torch.__trace"), "handlers", []):
        yield


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Callable[[object], None]:
    """Call it with what the terminal summary should say of the test."""
    lines = request.config.stash.setdefault(_LINES, [])
    return lambda told: lines.append(f"{request.node.name}: {told}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write the counts of the sweeps."""
    lines = config.stash.get(_LINES, [])
    if lines:
        terminalreporter.section("compared with eager autocast")
        for line in lines:
            terminalreporter.line(line)
