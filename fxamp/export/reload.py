"""Load artifacts in a process that cannot import fxamp, and run them.

This text is run by ``python -c``: it uses nothing of fxamp, and bars it.  Each line of its standard input is
a request in JSON; it answers each with a line.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from typing import Any


def run(request: str) -> None:
    """Run an artifact for the calls in a file; write what it gives to another one.

    Args:
        request: JSON: ``artifact``, the file to load; ``format``; ``imports``, what it needs; ``calls``, a
            file of ``torch.save``: a list of ``(args, kwargs)``; ``ambient``, for each of them the dtype of a
            region around it, or ``None``; ``device_type``; ``results``, the file that ``torch.save`` writes:
            for each call the leaves of its result, or the text of an error.
    """
    import torch  # noqa: PLC0415  after fxamp is barred

    asked = json.loads(request)
    for name in asked["imports"]:
        importlib.import_module(name)
    torch.set_num_threads(asked["threads"])
    loaded: Any
    if asked["format"] == "pt2":
        loaded = torch.export.load(asked["artifact"]).module()
    else:
        loaded = torch._inductor.aoti_load_package(asked["artifact"])
    calls = torch.load(asked["calls"], weights_only=False)
    results: list[Any] = []
    for (args, kwargs), ambient in zip(calls, asked["ambient"], strict=True):
        torch.manual_seed(0)
        dtype = getattr(torch, ambient or "bfloat16")
        region = torch.autocast(asked["device_type"], dtype, enabled=ambient is not None)
        try:
            with torch.no_grad(), region:
                results.append(torch.utils._pytree.tree_leaves(loaded(*args, **kwargs)))
        except Exception:  # noqa: BLE001  whatever it is, the asker is told
            results.append(traceback.format_exc())
    torch.save(results, asked["results"])


if __name__ == "__main__":
    sys.modules["fxamp"] = None  # type: ignore[assignment]
    for line in sys.stdin:
        try:
            run(line)
            print("done", flush=True)  # noqa: T201  an answer
        except Exception:  # noqa: BLE001  likewise
            print(json.dumps(traceback.format_exc()), flush=True)  # noqa: T201
