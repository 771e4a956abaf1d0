"""What the README says works."""

import re
from pathlib import Path

import pytest
import torch

from fxamp import passes

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [text.strip() for language, text in BLOCKS if not language and text.startswith("pip ")]


def test_the_two_commands_stand_there_and_no_other() -> None:
    assert COMMANDS == [
        "pip install -e '.[demo]' && python -m fxamp demo",
        "pip install -e '.[test]' && pytest -n auto --maxprocesses 4",
    ]


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = next(text for language, text in BLOCKS if language == "python")
    scope: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), scope)
    scores, printed = scope["scores"], capsys.readouterr().out
    assert isinstance(scores, torch.Tensor)
    assert scores.dtype is torch.bfloat16
    assert "aten::linear" in printed
    assert ": bf16[" in printed


def test_the_example_of_other_precisions_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # it writes a plan
    scope: dict[str, object] = {}
    for example in [text for language, text in BLOCKS if language == "python"][:2]:
        exec(compile(example, "README.md", "exec"), scope)
    assert "fp32: override keep float32 (module='2'): logits" in capsys.readouterr().out
    assert (tmp_path / "plan.json").exists()


def test_every_file_and_folder_that_it_names_exists() -> None:
    names = set(re.findall(r"`((?:fxamp|passes|benchmarks)/[\w/.*]*)`", README))
    assert len(names) > 10
    for name in names:
        assert list(ROOT.glob(name.rstrip("/"))), name


def test_it_counts_the_passes_right() -> None:
    assert passes.__doc__ is not None
    rows = re.findall(r"^ ?(\d+)    ``", passes.__doc__, flags=re.MULTILINE)
    words = {14: "fourteen", 15: "fifteen", 16: "sixteen", 17: "seventeen", 18: "eighteen"}
    assert f"{words[len(rows)]} passes" in README
