"""A converted model trains in the trainers of others as the plain model does under their own autocast.

In every test the trainer's own mixed precision is off for the converted model and on for the plain one.  Both
have the same seed, data order and dropout; losses of every step and the final state are compared bit for bit.
"""

from __future__ import annotations

import copy
import gc
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fxamp
from tests.models import SmallCNN, autocast, equal

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),  # Lightning
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),  # Lightning
]
DTYPE = torch.bfloat16


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate keeps the precision of a process in a singleton."""
    _reset()
    yield
    _reset()
    gc.collect()


def _reset() -> None:
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)


def _assert_same_state(one: nn.Module, other: nn.Module) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert equal(ours[name], theirs[name]), name


# --- Hugging Face Trainer -------------------------------------------------------------------------------


class Sentences(Dataset[dict[str, Tensor]]):
    """Tokens with a column that no model takes."""

    def __init__(self, count: int = 14) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(3, 99, (count, 6), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index]
        return {
            "input_ids": tokens,
            "labels": tokens,
            "attention_mask": torch.ones_like(tokens),
            "id": tokens[0],
        }


def _gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=99, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


def _arguments(folder: Path, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    defaults = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "seed": 11,
    }
    return transformers.TrainingArguments(**{**defaults, **options})


def _trainer(model: nn.Module, folder: Path, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    _reset()
    return transformers.Trainer(
        model=model,
        args=_arguments(folder, **options),
        train_dataset=Sentences(),
        eval_dataset=Sentences(5),
    )


def _history(trainer: Any) -> list[dict[str, float]]:
    """Losses and norms of gradients, without times."""
    kept = ("loss", "grad_norm", "eval_loss", "learning_rate", "step", "train_loss")
    return [{key: entry[key] for key in kept if key in entry} for entry in trainer.state.log_history]


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "eval_strategy": "epoch"}])
def test_hugging_face_trainer(tmp_path: Path, options: dict[str, Any]) -> None:
    plain, source = _gpt2(), _gpt2()
    amp = fxamp.convert(source, device_type="cpu", dtype=DTYPE)
    theirs = _trainer(plain, tmp_path / "theirs", bf16=True, **options)
    theirs.train()
    ours = _trainer(amp, tmp_path / "ours", **options)
    ours.train()
    assert _history(ours) == _history(theirs)
    assert len(_history(ours)) > 4
    _assert_same_state(source, plain)


def test_hugging_face_checkpoints_are_the_sources_and_training_goes_on_from_them(tmp_path: Path) -> None:
    plain, source, resumed = _gpt2(), _gpt2(), _gpt2()
    theirs = _trainer(plain, tmp_path / "theirs", bf16=True)
    theirs.train()
    amp = fxamp.convert(source, device_type="cpu", dtype=DTYPE)
    ours = _trainer(amp, tmp_path / "ours", save_strategy="epoch")
    ours.train()
    first = tmp_path / "ours" / "checkpoint-4"
    again = _trainer(fxamp.convert(resumed, device_type="cpu", dtype=DTYPE), tmp_path / "again")
    again.train(resume_from_checkpoint=str(first))
    _assert_same_state(resumed, plain)
    last = type(source).from_pretrained(tmp_path / "ours" / "checkpoint-8")
    _assert_same_state(last, plain)
    amp.save_pretrained(tmp_path / "saved")
    _assert_same_state(type(source).from_pretrained(tmp_path / "saved"), plain)


def test_hugging_face_evaluation_and_prediction(tmp_path: Path) -> None:
    plain, source = _gpt2(), _gpt2()
    theirs = _trainer(plain, tmp_path / "theirs", bf16=True)
    ours = _trainer(fxamp.convert(source, device_type="cpu", dtype=DTYPE), tmp_path / "ours")
    assert ours.label_names == theirs.label_names == ["labels"]
    for trainer in (ours, theirs):
        trainer._set_signature_columns_if_needed()
    assert set(ours._signature_columns) == set(theirs._signature_columns)
    assert "input_ids" in ours._signature_columns
    assert ours.model.num_parameters() == plain.num_parameters()
    assert ours.model.config is source.config
    assert ours.evaluate()["eval_loss"] == theirs.evaluate()["eval_loss"]
    found, expected = ours.predict(Sentences(5)), theirs.predict(Sentences(5))
    assert (found.predictions[0] == expected.predictions[0]).all()


def test_a_region_of_the_hugging_face_trainer_does_no_harm(tmp_path: Path) -> None:
    plain, source = _gpt2(), _gpt2()
    _trainer(plain, tmp_path / "theirs", bf16=True).train()
    _trainer(fxamp.convert(source, device_type="cpu", dtype=DTYPE), tmp_path / "ours", bf16=True).train()
    _assert_same_state(source, plain)


def test_float16_in_the_hugging_face_trainer_takes_the_scaler_of_the_model(tmp_path: Path) -> None:
    """Accelerate has no float16 on the CPU: the plain model gets its region and torch's scaler by hand.

    accelerate does not know that gradients are scaled when it clips them, so ``max_grad_norm=0``.
    """
    plain, source = _gpt2(), _gpt2()
    theirs = _trainer(plain, tmp_path / "theirs", max_grad_norm=0.0)
    theirs.compute_loss_context_manager = lambda: autocast(torch.float16)
    theirs.accelerator.scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    theirs.train()
    amp = fxamp.convert(source, device_type="cpu", dtype=torch.float16)
    amp.scaler.set_growth_interval(3)
    ours = _trainer(amp, tmp_path / "ours", max_grad_norm=0.0)
    ours.accelerator.scaler = amp.scaler
    ours.train()
    assert _history(ours) == _history(theirs)
    assert amp.scaler.get_scale() == theirs.accelerator.scaler.get_scale() > 2**16
    _assert_same_state(source, plain)


# --- accelerate ------------------------------------------------------------------------------------------


def _images(count: int = 14) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(count, 3, 8, 8, generator=generator)
    return TensorDataset(images, torch.randint(5, (count,), generator=generator))


def _accelerate(model: nn.Module, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and norms of gradients over three epochs, clipped, two batches a step."""
    accelerate = pytest.importorskip("accelerate")
    _reset()
    torch.manual_seed(3)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(_images(), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, norms = [], []
    for _ in range(3):
        for images, labels in loader:
            with accelerator.accumulate(model):
                # accelerate makes the plain model's outputs float32; a converted one gives autocast's own
                loss = functional.cross_entropy(model(images).float(), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
    return losses, norms


def _cnn() -> SmallCNN:
    torch.manual_seed(0)
    return SmallCNN()


def test_accelerate() -> None:
    plain, source = _cnn(), _cnn()
    amp = fxamp.convert(source, device_type="cpu", dtype=DTYPE)
    theirs = _accelerate(plain, mixed_precision="bf16")
    ours = _accelerate(amp)
    for found, expected in zip(ours, theirs, strict=True):
        assert len(found) == len(expected) > 5
        assert all(map(equal, found, expected))
    _assert_same_state(source, plain)


def test_accelerate_makes_only_the_outputs_of_its_own_autocast_float32() -> None:
    accelerate = pytest.importorskip("accelerate")
    plain, amp = _cnn(), fxamp.convert(_cnn(), device_type="cpu", dtype=DTYPE)
    images = _images()[:4][0]
    torch.manual_seed(5)
    expected = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(plain)(images)
    _reset()
    torch.manual_seed(5)
    found = accelerate.Accelerator(cpu=True).prepare(amp)(images)
    assert (expected.dtype, found.dtype) == (torch.float32, torch.bfloat16)
    assert equal(found.float(), expected)


def test_accelerate_saves_and_loads_the_state_of_the_source(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    amp = fxamp.convert(_cnn(), device_type="cpu", dtype=DTYPE)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(amp)
    before = copy.deepcopy(amp.state_dict())
    accelerator.save_state(str(tmp_path))
    with torch.no_grad():
        prepared.head.weight.zero_()
    accelerator.load_state(str(tmp_path))
    assert all(equal(before[name], tensor) for name, tensor in amp.state_dict().items())
    assert accelerator.unwrap_model(prepared) is amp
    assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False) is amp
    assert accelerator.get_state_dict(prepared).keys() == before.keys()


def test_accelerate_steps_with_the_scaler_of_a_float16_model() -> None:
    accelerate = pytest.importorskip("accelerate")
    plain, source = _cnn(), _cnn()
    amp = fxamp.convert(source, device_type="cpu", dtype=torch.float16)
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.scaler = amp.scaler
    reference = torch.amp.GradScaler("cpu")
    ours = accelerator.prepare(torch.optim.AdamW(source.parameters(), lr=1e-2))
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    prepared = accelerator.prepare(amp)
    for epoch in range(2):
        for images, labels in DataLoader(_images(), batch_size=4):
            torch.manual_seed(epoch)
            with autocast(torch.float16):
                expected = functional.cross_entropy(plain(images), labels)
            reference.scale(expected).backward()
            reference.unscale_(theirs)
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            reference.step(theirs)
            reference.update()
            theirs.zero_grad()
            torch.manual_seed(epoch)
            loss = functional.cross_entropy(prepared(images).float(), labels)
            accelerator.backward(loss)
            amp.scaler.unscale_(ours.optimizer)  # accelerate unscales only under its own fp16
            accelerator.clip_grad_norm_(amp.parameters(), 0.5)
            ours.step()
            ours.zero_grad()
            assert equal(loss, expected)
    _assert_same_state(source, plain)
    assert amp.scaler.get_scale() == reference.get_scale()


# --- Lightning --------------------------------------------------------------------------------------------


def _lightning() -> Any:
    return pytest.importorskip("lightning.pytorch")


def _lit(model: nn.Module) -> Any:
    """A LightningModule around *model* that keeps its losses."""

    class Lit(_lightning().LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.losses: list[Tensor] = []

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return self._loss(batch)

        def validation_step(self, batch: list[Tensor], index: int) -> None:
            self._loss(batch)

        def _loss(self, batch: list[Tensor]) -> Tensor:
            images, labels = batch
            loss = functional.cross_entropy(self.model(images).float(), labels)
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Lit()


def _fit(lit: Any, folder: Path, checkpoint: Path | None = None, **options: Any) -> Any:
    lightning = _lightning()
    lightning.seed_everything(4, verbose=False)
    defaults: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 2, "gradient_clip_val": 0.5}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        **{"enable_checkpointing": False, **defaults, **quiet, **options}, default_root_dir=folder
    )
    trainer.fit(
        lit,
        DataLoader(_images(), batch_size=4, shuffle=True),
        DataLoader(_images(6), batch_size=4),
        ckpt_path=checkpoint,
    )
    return trainer


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}])
def test_lightning(tmp_path: Path, options: dict[str, Any]) -> None:
    theirs = _lit(_cnn())
    ours = _lit(fxamp.convert(_cnn(), device_type="cpu", dtype=DTYPE))
    _fit(theirs, tmp_path, precision="bf16-mixed", **options)
    _fit(ours, tmp_path, **options)
    assert len(ours.losses) == len(theirs.losses) > 10
    assert all(map(equal, ours.losses, theirs.losses))
    _assert_same_state(ours, theirs)
    assert ours.model.training


def test_lightning_checkpoints_are_the_plain_models(tmp_path: Path) -> None:
    theirs = _lit(_cnn())
    _fit(theirs, tmp_path, precision="bf16-mixed")
    ours = _lit(fxamp.convert(_cnn(), device_type="cpu", dtype=DTYPE))
    trainer = _fit(ours, tmp_path, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt", weights_only=False)
    resumed = _lit(fxamp.convert(_cnn(), device_type="cpu", dtype=DTYPE))
    _fit(resumed, tmp_path, tmp_path / "one.ckpt")
    plain = _lit(_cnn())
    plain.load_state_dict(torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"])
    _assert_same_state(plain, ours)
    assert len(resumed.losses) + len(ours.losses) >= len(theirs.losses)


def test_lightning_takes_the_scaler_of_a_float16_model(tmp_path: Path) -> None:
    plugin = pytest.importorskip("lightning.pytorch.plugins.precision").MixedPrecision
    theirs, scaler = _lit(_cnn()), torch.amp.GradScaler("cpu")
    _fit(theirs, tmp_path, plugins=[plugin("16-mixed", "cpu", scaler)])
    amp = fxamp.convert(_cnn(), device_type="cpu", dtype=torch.float16)
    ours = _lit(amp)
    _fit(ours, tmp_path, plugins=[plugin("16-mixed", "cpu", amp.scaler)])  # its region does not reach amp
    assert all(map(equal, ours.losses, theirs.losses))
    _assert_same_state(ours, theirs)
    assert amp.scaler.get_scale() == scaler.get_scale()


def test_a_whole_lightning_module_can_be_converted(tmp_path: Path) -> None:
    """Its ``training_step`` runs eagerly in a region: exact, but nothing is captured."""
    theirs, ours = _lit(_cnn()), _lit(_cnn())
    _fit(theirs, tmp_path, precision="bf16-mixed")
    _fit(fxamp.convert(ours, device_type="cpu", dtype=DTYPE), tmp_path)
    assert len(ours.losses) == len(theirs.losses) > 10
    assert all(map(equal, ours.losses, theirs.losses))
    _assert_same_state(ours, theirs)


# --- the README -------------------------------------------------------------------------------------------


def _readme(library: str) -> str:
    """The snippet of the README that is about *library*."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    (snippet,) = (block for block in blocks if block.startswith(f"# {library}"))
    return str(snippet)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`:UserWarning")
@pytest.mark.parametrize("library", ["transformers", "accelerate", "Lightning"])
def test_the_snippets_of_the_readme_run(library: str, tmp_path: Path) -> None:
    scope: dict[str, Any] = {"fxamp": fxamp, "torch": torch, "functional": functional}
    scope["loader"] = DataLoader(_images(8), batch_size=4)
    model = scope["model"] = _gpt2() if library == "transformers" else _cnn()
    if library == "transformers":
        scope["transformers"] = pytest.importorskip("transformers")
        scope["arguments"], scope["data"] = _arguments(tmp_path, num_train_epochs=1), Sentences(4)
    elif library == "accelerate":
        scope["accelerator"] = pytest.importorskip("accelerate").Accelerator(cpu=True)
        scope["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        scope["lightning"] = SimpleNamespace(Trainer=partial(_lightning().Trainer, **quiet))
        scope["lit"] = _lit(model)
    before = copy.deepcopy(model.state_dict())
    exec(compile(_readme(library), "README.md", "exec"), scope)
    changed = [name for name, tensor in model.state_dict().items() if not equal(tensor, before[name])]
    assert len(changed) > 5


# --- batches -----------------------------------------------------------------------------------------------


def test_a_smaller_last_batch_is_captured_once() -> None:
    amp = fxamp.convert(_cnn(), device_type="cpu", dtype=DTYPE)
    for last in (2, 1):
        loader = DataLoader(_images(12 + last), batch_size=4, shuffle=True)
        counts = []
        for _ in range(3):
            for images, labels in loader:
                functional.cross_entropy(amp(images).float(), labels).backward()
            counts.append(len(amp.graph_modules))
        assert counts[0] == counts[1] == counts[2] == (1 if last == 2 else 2)
