"""The demonstration says what is true."""

import io
import sys

import pytest
import torch
from rich.console import Console

from fxamp import demo
from fxamp.__main__ import main


@pytest.fixture(scope="module")
def outcome() -> demo.Outcome:
    return demo.compare(demo.load_data(192), epochs=1)


def test_both_trainings_end_in_the_same_bits(outcome: demo.Outcome) -> None:
    ours, theirs = outcome.fxamp.network.state_dict(), outcome.autocast.network.state_dict()
    assert outcome.equal
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert ours["norm_1.num_batches_tracked"] == 3  # 160 images in batches of 64


def test_the_training_moved_the_weights(outcome: demo.Outcome) -> None:
    torch.manual_seed(0)
    fresh = demo.DigitNetwork().state_dict()
    assert not torch.equal(outcome.fxamp.network.state_dict()["digits.weight"], fresh["digits.weight"])
    assert not torch.equal(
        outcome.fxamp.network.state_dict()["digits.weight"],
        outcome.float32.network.state_dict()["digits.weight"],
    )


def test_the_graph_holds_the_casts_that_eager_makes(outcome: demo.Outcome) -> None:
    assert outcome.casts_in_graph == outcome.casts_by_eager > 0
    assert any(": bf16[" in line and " = to(" in line for line in outcome.graph)


def test_it_prints_what_it_found(outcome: demo.Outcome) -> None:
    text = io.StringIO()
    demo.print_outcome(outcome, Console(file=text, width=100))
    printed = text.getvalue()
    assert "All 18 weights and buffers are bit-equal" in printed
    assert printed.count(f"{outcome.autocast.losses[0]:.9f}") == 2
    assert f"{outcome.casts_in_graph} written in the graph" in printed


def test_a_difference_is_found_and_named(outcome: demo.Outcome) -> None:
    one, other = demo.DigitNetwork(), demo.DigitNetwork()
    other.load_state_dict(one.state_dict())
    with torch.no_grad():
        other.digits.bias[3] += 2**-20
    assert demo.differing(one, other) == ("digits.bias",)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_the_command_succeeds(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = demo.load_data(96)
    monkeypatch.setattr(demo, "load_data", lambda: data)
    assert main(["demo", "--device", "cpu", "--dtype", name, "--epochs", "1"]) == 0
    assert "bit-equal" in capsys.readouterr().out


def test_without_scikit_learn_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo"]) == 2
    assert "pip install 'fxamp[demo]'" in capsys.readouterr().err


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "demo" in capsys.readouterr().out
