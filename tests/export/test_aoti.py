"""A package of compiled code runs in a process that cannot import fxamp."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import fxamp
from fxamp.export.check import FreshProcess, distance


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # of inductor, about this machine
def test_a_small_model_is_compiled_loaded_and_near_to_eager_autocast(
    tmp_path: Path, fresh: FreshProcess
) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    file, x = tmp_path / "model.pt2", torch.randn(3, 8)
    artifact = fxamp.export(
        model, (x,), file, format="aoti", dtype=torch.bfloat16, device_type="cpu", check=False
    )
    assert (artifact.format, artifact.outputs[0].dtype) == ("aoti", "bfloat16")
    assert fxamp.read_artifact(file) == artifact
    (got,) = fresh.run(file, [((x,), {})], format="aoti")
    assert not isinstance(got, str), got
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = model(x)
    decibel = float(distance(got, [wanted]).split()[0])
    assert decibel > 40 or math.isinf(decibel)
