"""Load an artifact in a process that cannot import fxamp, and run it.

This text is run by ``python -c``: it uses nothing of fxamp, and bars it.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any


def run(artifact: str, call: str, result: str, settings: str) -> None:
    """Run the artifact for the call in the file *call*; write the tensors it gives to the file *result*.

    Args:
        artifact: The file to load.
        call: A file of ``torch.save``: ``(args, kwargs)``.
        result: Where to write what ``torch.save`` makes of the leaves of the result.
        settings: JSON: ``format``, ``imports``, ``threads``, and ``ambient``, the dtype of a region around
            the call, or ``None``.
    """
    sys.modules["fxamp"] = None  # type: ignore[assignment]
    chosen = json.loads(settings)
    import torch  # noqa: PLC0415  after fxamp is barred

    for name in chosen["imports"]:
        importlib.import_module(name)
    torch.set_num_threads(chosen["threads"])
    args, kwargs = torch.load(call, weights_only=False)
    loaded: Any
    if chosen["format"] == "pt2":
        loaded = torch.export.load(artifact).module()
    else:
        loaded = torch._inductor.aoti_load_package(artifact)
    torch.manual_seed(0)
    with torch.no_grad():
        if chosen["ambient"]:
            with torch.autocast(chosen["device_type"], getattr(torch, chosen["ambient"])):
                value = loaded(*args, **kwargs)
        else:
            value = loaded(*args, **kwargs)
    torch.save(torch.utils._pytree.tree_leaves(value), result)


if __name__ == "__main__":
    run(*sys.argv[1:])
