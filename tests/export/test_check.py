"""How far apart results are: the worst of all tensors, in decibels and in units of the last place."""

from __future__ import annotations

import torch

from fxamp.export.check import distance


def test_the_worst_in_decibels_and_the_worst_in_ulps_may_be_two_tensors() -> None:
    noisy, coarse = torch.tensor([1.0, 1.0]), torch.tensor([1024.0, 2.0**-10])
    one_ulp = torch.tensor([1.0, 1.0 + 2.0**-23])
    small_doubled = torch.tensor([1024.0, 2.0**-9])  # 2**23 steps away, and no noise beside 1024

    assert distance([one_ulp, small_doubled], [noisy, coarse]).endswith(
        "dB, at most 8,388,608 ulp from the converted model"
    )
    assert distance([one_ulp + 0.25, small_doubled], [noisy, coarse]).startswith(
        "12.0 dB, at most 8,388,608 ulp"
    )


def test_results_without_floating_tensors_are_as_near_as_can_be() -> None:
    assert (
        distance([torch.tensor(1), 3], [torch.tensor(2), 4])
        == "inf dB, at most 0 ulp from the converted model"
    )
