"""Load an ONNX model in a process that cannot import fxamp, and run it by onnxruntime.

This text is run by ``python -c``: it uses nothing of fxamp, and bars it.  What onnxruntime warns of is on the
standard error output.
"""

from __future__ import annotations

import sys
from typing import Any


def run(artifact: str, inputs: str, outputs: str, threads: str, optimize: str) -> None:
    """Run the model in the file *artifact* on the CPU.

    Args:
        artifact: The file to load.
        inputs: A file of ``numpy.savez`` with an array for each input.
        outputs: Where to write the results, likewise.
        threads: How many threads; does not matter for what is loaded.
        optimize: ``"yes"`` for the session options that are the default.
    """
    sys.modules["fxamp"] = None  # type: ignore[assignment]
    import numpy as np  # noqa: PLC0415  after fxamp is barred
    import onnxruntime as ort  # noqa: PLC0415

    options = ort.SessionOptions()
    options.intra_op_num_threads = int(threads)
    if optimize != "yes":
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(artifact, options, providers=["CPUExecutionProvider"])
    print("loaded", flush=True)  # noqa: T201  the parent reads it
    given: dict[str, Any] = dict(np.load(inputs))
    wanted = {port.name for port in session.get_inputs()}
    names = [port.name for port in session.get_outputs()]
    results = session.run(names, {name: value for name, value in given.items() if name in wanted})
    np.savez(outputs, **dict(zip(names, results, strict=True)))


if __name__ == "__main__":
    run(*sys.argv[1:])
