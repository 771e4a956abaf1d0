"""The command line: clear output, the right exit code, nothing of ours in the user's traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fxamp.cli import compare as compare_command
from fxamp.cli.main import COMMANDS, main

MODELS = """
import torch
from torch import nn


class Overflows(nn.Module):
    def __init__(self):
        super().__init__()
        self.wo = nn.Linear(8, 8)
        with torch.no_grad():
            self.wo.weight.fill_(1e5)

    def forward(self, x):
        return self.wo(x.abs() + 1)


class Crashes(nn.Module):
    def forward(self, x):
        return helper(x)


class Branches(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def helper(x):
    raise ValueError("the user's own error")


def small():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8)


def alone():
    return nn.Linear(8, 8)


def batches():
    return [torch.randn(2, 8) for _ in range(3)]


def overflows():
    return Overflows(), torch.randn(4, 8)


def crashes():
    return Crashes(), torch.randn(4, 8)


def branches():
    return Branches(), torch.randn(4, 8)


def raises():
    raise RuntimeError("no weights here")


def number():
    return 3
"""


@pytest.fixture
def models(tmp_path: Path) -> str:
    file = tmp_path / "models_of_mine.py"
    file.write_text(MODELS, encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    assert exit_.value.code == 0
    assert f"usage: fxamp {name}" in capsys.readouterr().out


def test_a_model_that_is_well_gives_0(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", f"{models}:small", "--dtype", "bf16"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("Bits equal to eager autocast: yes")
    assert printed.err == ""


def test_an_overflow_gives_1_and_is_named(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", f"{models}:overflows", "--dtype", "fp16"]) == 1
    printed = capsys.readouterr()
    assert "overflow" in printed.out
    assert "First Inf or NaN: aten::linear (module 'wo'" in printed.err


@pytest.mark.parametrize(
    ("bounds", "code"),
    [
        (["--min-sqnr", "30"], 0),
        (["--min-sqnr", "300"], 1),
        (["--max-ulp", "0"], 1),
        (["--max-ulp", "256"], 0),
    ],
)
def test_bounds_gate(models: str, bounds: list[str], code: int) -> None:
    assert main(["compare", f"{models}:small", "--dtype", "bf16", *bounds]) == code


def test_json_goes_to_a_file_or_to_standard_output(
    models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    assert main(["compare", f"{models}:small", "--json", str(file)]) == 0
    assert json.loads(file.read_text(encoding="utf-8"))["bits_equal"] is True
    capsys.readouterr()
    assert main(["report", f"{models}:small", "--json", "-"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert [row["op"] for row in read["operators"]] == ["aten::linear", "aten::relu"]


def test_inputs_come_from_a_factory_of_their_own(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", f"{models}:alone"]) == 2
    assert "--inputs" in capsys.readouterr().err
    assert main(["compare", f"{models}:alone", "--inputs", f"{models}:batches"]) == 0
    assert "3 inputs" in capsys.readouterr().out


def test_the_report_prints_operators_and_casts(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", f"{models}:small", "--dtype", "bf16"]) == 0
    printed = capsys.readouterr().out
    assert "aten::linear" in printed
    assert "1 graphs, 3 casts" in printed


def test_torchvision_has_a_short_name(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchvision", reason="torchvision is not installed")
    assert main(["report", "torchvision:alexnet", "--dtype", "bf16"]) == 0
    assert "features.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("nothing", "is no factory"),
        ("no.such.module:model", "there is no module"),
        ("no/such/file.py:model", "there is no file"),
        ("{models}:nothing", "it has:"),
        ("{models}:number", "let it return a model"),
        ("torch:float32", "name a function"),
        ("torchvision:resnet19", "resnet18"),
    ],
)
def test_a_wrong_factory_gives_2_and_a_way_out(
    models: str, factory: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if factory.startswith("torchvision"):
        pytest.importorskip("torchvision", reason="torchvision is not installed")
    assert main(["compare", factory.format(models=models)]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed


def test_a_missing_extra_gives_2_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    assert main(["report", "timm:resnet18"]) == 2
    assert "pip install timm" in capsys.readouterr().err


def test_a_missing_plan_gives_2(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", f"{models}:small", "--policy", "no_plan.json"]) == 2
    assert "no_plan.json" in capsys.readouterr().err


def test_an_unknown_option_gives_2() -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["compare", "--nothing"])
    assert exit_.value.code == 2


@pytest.mark.parametrize(
    ("command", "factory", "line"),
    [
        ("compare", "crashes", "raise ValueError"),
        ("report", "crashes", "raise ValueError"),
        ("compare", "raises", "no weights"),
    ],
)
def test_a_crash_of_the_users_code_keeps_its_traceback_and_not_ours(
    models: str, command: str, factory: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, f"{models}:{factory}"]) == 1
    printed = capsys.readouterr().err
    assert line in printed
    assert "models_of_mine.py" in printed
    assert "fxamp/" not in printed.replace(models, "")


def test_ctrl_c_ends_it_quietly(
    models: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compare_command, "compare_models", interrupted)
    assert main(["compare", f"{models}:small"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_signal_ends_a_real_process() -> None:
    code = (
        "import signal, sys; import fxamp.cli.main as m; import fxamp.cli.report as r, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background ignores it
        "def run(options):\n    print('ready', flush=True); time.sleep(60)\n"
        "r.run = run; sys.exit(m.main(['report', 'x:y']))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "interrupted\n"


def test_the_rules_of_a_device_type_are_printed_with_their_reasons(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["policy", "cuda", "--dtype", "fp16", "--op", "softmax"]) == 0
    printed = capsys.readouterr().out
    assert "aten::softmax.int" in printed
    assert "fp32_set_opt_dtype" in printed
    assert "aten::mm" not in printed
    assert main(["policy", "cuda", "--torch-version", "2.11", "--op", "rms_norm"]) == 1


@pytest.mark.parametrize(
    "arguments", [["policy"], ["policy", "nope"], ["policy", "cuda", "--torch-version", "1.0"]], ids=str
)
def test_a_policy_that_there_is_not_gives_2(arguments: list[str]) -> None:
    assert main(arguments) == 2


def test_a_plan_goes_from_the_report_to_the_next_command(
    models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    assert main(["report", f"{models}:small", "--dtype", "bf16", "--plan", str(plan)]) == 0
    assert main(["report", f"{models}:small", "--policy", str(plan)]) == 0
    assert main(["policy", "--policy", str(plan)]) == 0
    assert "Policy(cpu, torch.bfloat16" in capsys.readouterr().out
    assert main(["report", f"{models}:small", "--plan", str(tmp_path / "nowhere" / "plan.json")]) == 2


def test_export_writes_a_file_and_show_tells_what_is_in_it(
    models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, plan = tmp_path / "small.pt2", tmp_path / "plan.json"

    assert main(["export", f"{models}:small", str(file), "--dynamic-batch", "--output-dtypes", "keep"]) == 0
    exported = capsys.readouterr().out
    assert main(["show", str(file), "--plan", str(plan)]) == 0
    shown = capsys.readouterr().out

    assert exported == f"{file}: {shown}"
    assert "input_1: float32" in shown
    assert "output_0: float32  (cast from bfloat16, nothing is lost)" in shown
    assert "the same bits in a fresh process" in shown
    assert main(["report", f"{models}:small", "--policy", str(plan)]) == 0
    assert "not as planned" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["small", "model.zip"], 2, "format= is one of pt2, aoti, onnx"),
        (["small", "nowhere/model.pt2"], 2, "in a folder that is not there"),
        (["small", "model.pt2", "--dynamic", "x:0"], 2, "one of input"),
        (["small", "model.pt2", "--train"], 2, "evaluation mode"),
        (["branches", "model.pt2"], 1, "reads the value of a tensor to decide what runs next"),
    ],
)
def test_what_cannot_be_exported_is_told_without_a_traceback(
    arguments: list[str],
    code: int,
    said: str,
    models: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, file, *others = arguments

    assert main(["export", f"{models}:{name}", str(tmp_path / file), *others]) == code

    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told
    assert not (tmp_path / file).exists()


def test_show_of_another_file_is_wrong_use(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", models]) == 2
    assert models in capsys.readouterr().err
