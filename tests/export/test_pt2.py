"""An artifact of pt2 gives eager autocast's bits in a process that cannot import fxamp."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import fxamp
from fxamp.errors import ArgumentError, ExportError, ExportWarning
from fxamp.export.check import FreshProcess
from tests.export import exported_models as models
from tests.models import equal
from tests.zoo.leaves import named_tensors

Call = tuple[tuple[Any, ...], dict[str, Any]]

BF16 = torch.bfloat16


def _x(*sizes: int, seed: int = 1) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def _call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


def _ids() -> Tensor:
    return torch.tensor([[1, 5, 3], [2, 0, 10]])


def _encoded() -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.BertModel(transformers.BertConfig(vocab_size=20, **sizes))


MODELS: dict[str, tuple[Callable[[], nn.Module], Call]] = {
    "tied weights": (models.Tied, _call(_ids())),
    "one module twice": (models.TwiceUsed, _call(_x(3, 8))),
    "a buffer that is written to": (models.Counting, _call(_x(3, 8))),
    "a buffer that is bound anew": (models.Rebinding, _call(_x(3, 8))),
    "a dict": (lambda: models.Structured("dict"), _call(_x(3, 8))),
    "an ordered dict": (lambda: models.Structured("ordered"), _call(_x(3, 8))),
    "a tuple": (lambda: models.Structured("tuple"), _call(_x(3, 8))),
    "a named tuple": (lambda: models.Structured("named"), _call(_x(3, 8))),
    "a dataclass": (lambda: models.Structured("dataclass"), _call(_x(3, 8))),
    "an object": (lambda: models.Structured("object"), _call(_x(3, 8))),
    "a model output": (_encoded, _call(input_ids=_ids(), attention_mask=torch.ones(2, 3, dtype=torch.int64))),
    "keyword arguments": (models.Keywords, _call(_x(3, 8), scale=_x(4), flag=True)),
    "a custom operator": (models.Custom, _call(_x(3, 8))),
    "fast attention": (models.attention, _call(_x(2, 5, 16))),
    "convolution and norm": (models.convolutional, _call(_x(2, 3, 8, 8))),
    "float64 and integers": (models.Wide, _call(_x(3, 8), _x(3, 4).double(), torch.ones(4, 3).long())),
    "a cache that the first call fills": (models.FillsCache, _call(_x(3, 8))),
    "values read": (models.Reading, _call(_x(3, 8), torch.ones(3, 1).bool())),
}


def _made(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def _eager(model: nn.Module, calls: list[Call], dtype: torch.dtype = BF16) -> list[list[Tensor]]:
    """What a copy of *model* gives under eager autocast, call after call."""
    copied, results = copy.deepcopy(model).eval(), []
    for args, kwargs in copy.deepcopy(calls):
        with torch.no_grad(), torch.autocast("cpu", dtype):
            value = copied(*args, **kwargs)
        results.append([tensor.clone() for tensor in named_tensors(value).values()])
    return results


def _assert_equal(got: list[Any], wanted: list[list[Tensor]]) -> None:
    for found, expected in zip(got, wanted, strict=True):
        assert not isinstance(found, str), found
        tensors = [leaf for leaf in found if isinstance(leaf, Tensor)]
        assert [t.dtype for t in tensors] == [t.dtype for t in expected]
        assert all(equal(one, other) for one, other in zip(tensors, expected, strict=True))


def _state(model: nn.Module) -> Any:
    tensors = {name: (id(t), t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    return tensors, model.training, torch.get_rng_state(), set(vars(model))


def _assert_unchanged(model: nn.Module, before: Any) -> None:
    tensors, training, random_state, names = _state(model)
    assert tensors.keys() == before[0].keys()
    for name, (identity, value) in tensors.items():
        assert identity == before[0][name][0]
        assert equal(value, before[0][name][1])
    assert training is before[1]
    assert torch.equal(random_state, before[2])
    assert names == before[3]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_keeps_its_bits_also_in_an_ambient_region(
    name: str, tmp_path: Path, fresh: FreshProcess
) -> None:
    build, (args, kwargs) = MODELS[name]
    model = _made(build).eval()
    before = _state(model)
    file = tmp_path / "model.pt2"
    artifact = fxamp.export(model, args, kwargs, file, dtype=BF16, device_type="cpu", check=False)
    _assert_unchanged(model, before)
    calls = [(args, kwargs)] * 3
    imports = [name for name in artifact.imports if not name.startswith("tests.")]
    imports += [name for name in artifact.imports if name.startswith("tests.")]
    got = fresh.run(file, calls, imports=imports, ambient=[None, "float16", "bfloat16"])
    _assert_equal(got, _eager(model, calls))


@pytest.mark.parametrize("name", ["tied weights", "convolution and norm", "fast attention"])
def test_each_weight_is_stored_once_a_dtype_under_the_name_that_the_model_has_for_it(
    name: str, tmp_path: Path
) -> None:
    build, (args, kwargs) = MODELS[name]
    model = _made(build).eval()
    file = tmp_path / "model.pt2"
    artifact = fxamp.export(model, args, kwargs, file, dtype=BF16, device_type="cpu", check=False)
    state = torch.export.load(file).state_dict
    stored = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in state.values()}
    assert sum(stored.values()) == artifact.weight_bytes
    own = {name.replace(".", "_") for name in model.state_dict()}
    strangers = {name for name in state if name.replace(".", "_") not in own}
    assert all(any(name.startswith(known) for known in own) for name in strangers), strangers


def test_weights_of_linear_layers_take_half_the_bytes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    file = tmp_path / "model.pt2"
    artifact = fxamp.export(model, (_x(3, 8),), file, dtype=BF16, device_type="cpu", check=False)
    count = sum(weight.numel() for weight in model.parameters())
    assert (artifact.weight_bytes, artifact.float32_bytes) == (2 * count, 4 * count)
    assert set(torch.export.load(file).state_dict) == set(model.state_dict())


def test_a_model_in_training_mode_is_exported_in_evaluation_mode_and_stays_as_it_was(
    tmp_path: Path, fresh: FreshProcess
) -> None:
    model = nn.Sequential(models.convolutional(), nn.Dropout(0.5)).train()
    before = _state(model)
    file = tmp_path / "model.pt2"
    fxamp.export(model, (_x(2, 3, 8, 8),), file, dtype=BF16, device_type="cpu", check=False)
    _assert_unchanged(model, before)
    assert all(child.training for child in model.modules())
    calls = [_call(_x(2, 3, 8, 8))]
    _assert_equal(fresh.run(file, calls), _eager(model, calls))


def test_a_converted_and_a_frozen_model_are_taken_with_their_precision(
    tmp_path: Path, fresh: FreshProcess
) -> None:
    model, call = _made(models.convolutional).eval(), _call(_x(2, 3, 8, 8))
    amp = fxamp.convert(model, dtype=torch.float16, device_type="cpu")
    for index, given in enumerate((amp, fxamp.freeze(amp, call[0]))):
        file = tmp_path / f"{index}.pt2"
        artifact = fxamp.export(given, *call, file, check=False)
        assert artifact.dtype == "float16"
        _assert_equal(fresh.run(file, [call]), _eager(model, [call], torch.float16))
        with pytest.raises(ArgumentError, match="has its precision"):
            fxamp.export(given, *call, file, dtype=BF16)


def test_an_override_is_kept(tmp_path: Path, fresh: FreshProcess) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    policy = fxamp.Policy.native("cpu", BF16).keep("float32", module="2", why="head")
    file, call = tmp_path / "model.pt2", _call(_x(3, 8))
    artifact = fxamp.export(model, *call, file, policy=policy, check=False)
    assert artifact.outputs[0].dtype == "float32"
    (got,) = fresh.run(file, [call])
    with torch.no_grad():
        wanted = fxamp.convert(model, policy=policy).eval()(*call[0])
    _assert_equal([got], [[wanted]])


@pytest.mark.parametrize(
    ("inputs", "outputs", "taken", "given"),
    [
        ("keep", "autocast", torch.float32, (BF16, torch.float32)),
        ("low", "autocast", BF16, (BF16, torch.float32)),
        ("keep", "keep", torch.float32, (torch.float32, torch.float32)),
        ("keep", "low", torch.float32, (BF16, BF16)),
        ("low", "low", BF16, (BF16, BF16)),
    ],
)
def test_the_contract_decides_the_dtypes_of_inputs_and_outputs(
    inputs: Any,
    outputs: Any,
    taken: torch.dtype,
    given: tuple[torch.dtype, ...],
    tmp_path: Path,
    fresh: FreshProcess,
) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.linear(x)
            return hidden, hidden.float().softmax(-1)

    model, file, x = _made(Two), tmp_path / "model.pt2", _x(3, 8)
    artifact = fxamp.export(
        model, (x,), file, dtype=BF16, device_type="cpu", inputs=inputs, outputs=outputs, check=False
    )
    assert [port.dtype for port in artifact.inputs] == [str(taken).removeprefix("torch.")]
    assert [port.dtype for port in artifact.outputs] == [str(dtype).removeprefix("torch.") for dtype in given]
    x = x.to(taken)
    ((hidden, scores),) = _eager(model, [_call(x.float())])
    wanted = [hidden.to(given[0]), scores.to(given[1])]
    _assert_equal(fresh.run(file, [_call(x)]), [wanted])


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_symbolic_batch_takes_any_size(size: int, tmp_path: Path, fresh: FreshProcess) -> None:
    model, file = _made(models.convolutional).eval(), tmp_path / "model.pt2"
    shapes = ({0: Dim("batch")},)
    fxamp.export(
        model, (_x(3, 3, 8, 8),), file, dtype=BF16, device_type="cpu", dynamic_shapes=shapes, check=False
    )
    calls = [_call(_x(size, 3, 8, 8))]
    _assert_equal(fresh.run(file, calls), _eager(model, calls))


def test_weights_keep_their_strides_and_torch_warns_of_none(tmp_path: Path, fresh: FreshProcess) -> None:
    model, file = _made(models.convolutional).to(memory_format=torch.channels_last), tmp_path / "model.pt2"
    call = _call(_x(3, 3, 8, 8))
    fxamp.export(model, *call, file, dtype=BF16, device_type="cpu", check=False)
    weight = torch.export.load(file).state_dict["0.weight"]
    assert weight.is_contiguous(memory_format=torch.channels_last)
    _assert_equal(fresh.run(file, [call]), _eager(model, [call]))


def test_sizes_for_which_the_model_decides_otherwise_are_refused(tmp_path: Path) -> None:
    model, file = models.SizeDependent(4), tmp_path / "model.pt2"
    with pytest.raises(ExportError, match=r"b <= 16 satisfy the generated guard[\s\S]*max=4"):
        _export_sized(model, file, Dim("b", max=16))
    assert not file.exists()
    _export_sized(model, file, Dim("b", max=4))
    loaded = torch.export.load(file).module()
    calls = [_call(_x(4, 8))]
    with torch.no_grad():
        _assert_equal([[loaded(*calls[0][0])]], _eager(model, calls))
    with pytest.raises(AssertionError, match="Guard failed"):
        loaded(_x(5, 8))


def test_a_size_of_one_is_refused_where_the_model_runs_other_operators(tmp_path: Path) -> None:
    model, file = models.SizeDependent(None), tmp_path / "model.pt2"
    artifact = _export_sized(model, file, Dim("b"))
    assert artifact.notes == ("size 0 of x is at least 2: for 1 the model runs other operators",)
    loaded = torch.export.load(file).module()
    with torch.no_grad():
        _assert_equal([[loaded(_x(2, 8))]], _eager(model, [_call(_x(2, 8))]))
    with pytest.raises(RuntimeError, match="size 0 of x must be at least 2"):
        loaded(_x(1, 8))


def _export_sized(model: nn.Module, file: Path, dim: Any) -> fxamp.Artifact:
    shapes = ({0: dim},)
    return fxamp.export(
        model, (_x(3, 8),), file, dtype=BF16, device_type="cpu", dynamic_shapes=shapes, check=False
    )


def test_a_tensor_in_a_plain_attribute_is_not_kept_and_there_is_a_warning(
    tmp_path: Path, fresh: FreshProcess
) -> None:
    model, file, call = models.Keeping(), tmp_path / "model.pt2", _call(_x(3, 8))
    with pytest.warns(ExportWarning, match=r"attribute 'last'[\s\S]*register_buffer"):
        fxamp.export(model, *call, file, dtype=BF16, device_type="cpu", check=False)
    _assert_equal(fresh.run(file, [call]), _eager(model, [call]))


def test_what_an_artifact_cannot_name_is_told_in_its_notes(tmp_path: Path) -> None:
    model, file = models.Structured("object"), tmp_path / "model.pt2"
    fxamp.export(model, (_x(3, 8),), file, dtype=BF16, device_type="cpu", check=False)
    (note,) = fxamp.read_artifact(file).notes
    assert note.startswith("results: a dict of its attributes that hold tensors in the place of tests.")
    _, cache = torch.export.load(file).module()(_x(3, 8))
    assert list(cache) == ["keys"]


def test_a_model_that_reads_values_goes_the_way_that_it_has_for_exporters(
    tmp_path: Path, fresh: FreshProcess
) -> None:
    model, file = _made(models.Reading), tmp_path / "model.pt2"
    mask = torch.ones(3, 1).bool()
    artifact = fxamp.export(model, (_x(3, 8), mask), file, dtype=BF16, device_type="cpu", check=False)
    assert artifact.notes == (
        "the model reads values of tensors; here it goes the way that it has for exporters",
    )
    mask = torch.tensor([[True], [False], [True]])
    calls = [_call(_x(3, 8), mask)]
    _assert_equal(fresh.run(file, calls), _eager(model, calls))


def test_where_the_way_for_exporters_fails_what_the_model_itself_does_is_told(tmp_path: Path) -> None:
    call = (_x(3, 8), torch.ones(3, 1).bool())
    with pytest.raises(ExportError, match=r"it reads the value of a tensor .* bool\(mask\.all\(\)\)"):
        fxamp.export(_made(models.FailingForExporters), call, tmp_path / "model.pt2", dtype=BF16)


def test_a_way_for_exporters_that_gives_other_bits_is_refused_as_the_models_own(tmp_path: Path) -> None:
    model, file = _made(models.ReadingDifferently), tmp_path / "model.pt2"
    call = (_x(1, 8), torch.ones(1, 1).bool())
    with pytest.raises(
        ExportError, match=r"the way that it has for exporters gives other bits[\s\S]*result 0"
    ):
        fxamp.export(model, call, file, dtype=BF16, device_type="cpu")
    assert not file.exists()


@pytest.mark.parametrize(("model", "differs"), [(models.Reading, False), (models.ReadingDifferently, True)])
def test_a_size_of_one_is_refused_where_the_way_for_exporters_gives_other_bits(
    model: type[nn.Module], differs: bool, tmp_path: Path
) -> None:
    made, file, mask = _made(model), tmp_path / "model.pt2", torch.ones(3, 1).bool()
    shapes = ({0: Dim("b")},) * 2
    artifact = fxamp.export(
        made, (_x(3, 8), mask), file, dtype=BF16, device_type="cpu", dynamic_shapes=shapes, check=False
    )
    text = "for 1 the way that the model has for exporters gives other bits than the model"
    assert (f"size 0 of x is at least 2: {text}" in artifact.notes) is differs
    loaded = torch.export.load(file).module()
    with torch.no_grad():
        for size in (1, 2) if not differs else (2,):
            call = _call(_x(size, 8), mask[:size])
            _assert_equal([[loaded(*call[0])]], _eager(made, [call]))
    if differs:
        with pytest.raises(RuntimeError, match=f"size 0 of x must be at least 2: {text}"):
            loaded(_x(1, 8), mask[:1])


def test_the_check_runs_in_a_process_of_its_own_and_is_told(tmp_path: Path) -> None:
    file = tmp_path / "model.pt2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        artifact = fxamp.export(models.Counting(), (_x(3, 8),), file, dtype=BF16, device_type="cpu")
    assert artifact.check == "the same bits in a fresh process"
    assert fxamp.read_artifact(file) == artifact


def test_a_first_call_is_made_on_a_copy_and_told(tmp_path: Path) -> None:
    model = _made(models.FillsCache).eval()
    artifact = fxamp.export(model, (_x(3, 8),), tmp_path / "model.pt2", dtype=BF16)
    assert model.cache == {}
    assert model.seen == 0
    assert artifact.notes == (
        "the model sets attributes in its first call; this is what it does in the later ones",
    )
