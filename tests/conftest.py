"""What holds for all tests: one thread for kernels, so that small models do not wait for each other."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
