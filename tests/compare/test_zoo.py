"""On real models: bits equal to eager autocast, and a reference that is a plain float32 run bit for bit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from fxamp.compare.inputs import Item
from fxamp.compare.preserved import preserved
from fxamp.compare.session import Session
from fxamp.compare.statistics import same_bits
from fxamp.compare.subject import subject_of
from tests.zoo.entry import LIBRARIES, Entry, entries

_SHARE = {"nn": 10, "torchvision": 12, "timm": 25, "transformers": 12, "diffusers": 20, "smp": 1000, "pyg": 6}


class _Watched(Session):
    """Keeps the reference's results."""

    def _measure(self, leaves: list[Any], values: list[Tensor]) -> None:
        self.values = values
        super()._measure(leaves, values)


def _assert_well(entry: Entry) -> None:
    torch.manual_seed(0)
    try:
        model = entry.build().eval()
        args, kwargs = entry.inputs(False)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), preserved(model, (args, kwargs)):
            model(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  of the library's own
        pytest.skip(f"eager fails: {error}")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    session = _Watched(subject_of(model, None, torch.bfloat16, None), ("autocast", "float32"), None, None)
    item = Item(tuple(args), kwargs)
    session.run(0, item)
    found = session.result()
    plain = session._plain(lambda item: model(*item.args, **item.kwargs), item)
    tensors = [leaf for leaf in plain if isinstance(leaf, Tensor)]
    assert found.bits.equal, str(found.bits)
    assert not found.boundaries
    assert len(tensors) == len(session.values)
    assert all(same_bits(one, other) for one, other in zip(tensors, session.values, strict=True))
    assert all(same_bits(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("library", ["nn"])
def test_a_handful_is_compared_with_a_plain_run(library: str, subtests: pytest.Subtests) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for entry in entries(library)[:: 5 * _SHARE[library]]:
            with subtests.test(entry.name):
                _assert_well(entry)


@pytest.mark.slow
@pytest.mark.zoo
@pytest.mark.parametrize("library", LIBRARIES)
def test_models_of_the_zoo_are_compared_with_a_plain_run(library: str, subtests: pytest.Subtests) -> None:
    pytest.importorskip(LIBRARIES[library], reason=f"{library} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries
        for entry in entries(library)[:: _SHARE[library]]:
            with subtests.test(entry.name):
                _assert_well(entry)
