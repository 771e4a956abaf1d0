"""Plan files: one precision decision, carried from one place to another."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import fxamp
from fxamp import Policy
from fxamp.ir.text import show
from tests.models import SmallCNN, SmallTransformer
from tests.zoo.entry import Entry, entries

BF16 = torch.bfloat16
X = torch.ones(2, 8)
LAYERS = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
POLICY = Policy.native("cpu", BF16).keep("float32", module="2", why="logits")


def written(amp: fxamp.AmpModule, folder: Path) -> Path:
    path = folder / "plan.json"
    amp.plan().write(path)
    return path


def planned(folder: Path) -> Path:
    amp = fxamp.convert(copy.deepcopy(LAYERS), policy=POLICY)
    amp(X)
    amp.eval()(X)
    with torch.no_grad():
        amp(X)
    return written(amp, folder)


def test_a_plan_brings_the_policy_back_with_its_overrides(tmp_path: Path) -> None:
    policy = Policy.from_plan(planned(tmp_path))
    assert policy.overrides == POLICY.overrides
    assert policy.rules == POLICY.rules
    assert policy.low is BF16


def test_a_plan_says_what_every_operator_does_and_why(tmp_path: Path) -> None:
    data = json.loads(planned(tmp_path).read_text())
    assert data["torch"] == torch.__version__
    assert [(graph["training"], graph["grad"]) for graph in data["graphs"]] == [
        (True, True), (False, True), (False, False),
    ]  # fmt: skip
    assert data["graphs"][0]["inputs"] == ["f32[s0, s1]"]
    last = data["graphs"][0]["operators"][-1]
    assert (last["module"], last["op"], last["dtypes"]) == ("2", "aten::linear", "f32, f32, f32 -> f32")
    assert last["rule"] == "fp32: override keep float32 (module='2'): logits"


def test_the_same_model_gets_the_same_graph_without_a_warning(tmp_path: Path) -> None:
    path = planned(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp = fxamp.convert(copy.deepcopy(LAYERS), (X,), policy=Policy.from_plan(path))
    assert amp.report().plan_differences == ()
    assert amp.plan().graphs[0] in fxamp.policy.plan.Plan.read(path).graphs


def test_another_model_is_said_to_differ_line_by_line(tmp_path: Path) -> None:
    path = planned(tmp_path)
    other = nn.Sequential(LAYERS[0], nn.GELU(), LAYERS[2])
    with pytest.warns(fxamp.PlanWarning, match=r"another graph than in the plan") as caught:
        amp = fxamp.convert(other, (X,), policy=Policy.from_plan(path))
    lines = str(caught[0].message).splitlines()
    assert any(line.startswith("- module '1': aten::layer_norm") for line in lines)
    assert any(line.startswith("+ module '1': aten::gelu") for line in lines)
    assert amp.report().plan_differences == tuple(lines[1:])
    assert "not as planned: " in str(amp.report())


def test_a_call_that_the_plan_does_not_have_is_no_difference(tmp_path: Path) -> None:
    path = planned(tmp_path)
    amp = fxamp.convert(copy.deepcopy(LAYERS), policy=Policy.from_plan(path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp(torch.ones(3, 2, 8))


def test_a_plan_for_another_device_is_carried_there(tmp_path: Path) -> None:
    amp = fxamp.convert(copy.deepcopy(LAYERS), (X,), device_type="cuda", dtype=torch.float16)
    policy = Policy.from_plan(written(amp, tmp_path))
    assert (policy.table, policy.device_type) == ("cuda", "cuda")
    again = fxamp.convert(copy.deepcopy(LAYERS), (X,), policy=policy)
    assert show(again.graph_module) == show(amp.graph_module)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"format": "fxamp plan 0"}'])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(fxamp.PolicyError, match="is no plan"):
        Policy.from_plan(path)


def test_a_plan_that_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = planned(tmp_path)
    before = path.read_text()
    policy = POLICY.keep("float32", where=lambda site: True, optional=True)
    amp = fxamp.convert(copy.deepcopy(LAYERS), (X,), policy=policy)
    with pytest.raises(fxamp.PolicyError, match="cannot be imported"):
        amp.plan()
    assert path.read_text() == before


def round_trip(model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], folder: Path) -> int:
    """Convert, write, read and convert again; how many graphs were compared."""
    amp = fxamp.convert(model, device_type="cuda", dtype=BF16)
    amp.capture(*args, **kwargs)
    if not amp.graph_modules:
        return 0
    policy = Policy.from_plan(written(amp, folder))
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxamp.PlanWarning)
        again = fxamp.convert(model, policy=policy)
        again.capture(*args, **kwargs)
    texts = [[show(module) for module in converted.graph_modules] for converted in (amp, again)]
    assert texts[0] == texts[1]
    assert amp.plan().graphs == again.plan().graphs
    return len(texts[0])


@pytest.mark.parametrize("cls", [SmallCNN, SmallTransformer])
def test_a_plan_makes_the_same_graph_again(cls: type[nn.Module], tmp_path: Path) -> None:
    args = (torch.randn(2, 3, 8, 8),) if cls is SmallCNN else (torch.randint(0, 30, (2, 5)),)
    assert round_trip(cls(), args, {}, tmp_path) == 1


def is_small(entry: Entry) -> bool:
    return entry.library == "nn" or entry.fast


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_zoo_gets_the_same_graphs_again_from_its_plans(tmp_path: Path) -> None:
    compared = 0
    for entry in filter(is_small, (*entries("nn"), *entries("torchvision"))):
        torch.manual_seed(0)
        args, kwargs = entry.inputs(False)
        compared += bool(round_trip(entry.build().eval(), args, kwargs, tmp_path))
    assert compared >= 50
