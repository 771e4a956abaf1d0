"""What onnxruntime warns of, as it is told: without colours and times."""

from __future__ import annotations

import pytest

from fxamp.export.onnx_check import _warning

TEXT = "Could not find a CPU kernel"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (f"\x1b[0;93m2026-01-01 12:00:00.1 [W:onnxruntime:, folding.cc:589 ApplyImpl] {TEXT}\x1b[m", TEXT),
        (f"2026-01-01 12:00:00.1 [E:onnxruntime:Default, a.cc:1 Run] {TEXT}", TEXT),
        ("2026-01-01 12:00:00.1 [I:onnxruntime:, a.cc:1 Run] all is well", ""),
        ("UserWarning: of something else", ""),
    ],
)
def test_a_warning_is_its_text(line: str, text: str) -> None:
    assert _warning(line) == text
