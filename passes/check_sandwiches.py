"""``python -m fxamp.passes.check_sandwiches --device cpu``: which sandwiches round alike on this machine.

Runs the check of ``sandwich_table.py`` for every row, and prints what came of it.  The pass runs the same
check by itself before it relies on a row; this shows all of them at once.
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.table import Table

from fxamp.passes.sandwich_table import is_exact_on_device, rows

_LOW = (torch.bfloat16, torch.float16)


def check_sandwiches(device: torch.device) -> Table:
    """A table of all rows, checked on *device*."""
    table = Table(
        "operator", *(low.abbr for low in _LOW), title=f"op(x.float()).to(low) == op(x) on {device}"
    )
    for call in rows():
        found = [is_exact_on_device(call, low, device) for low in _LOW]
        table.add_row(str(call), *("equal" if same else "differs" for same in found))
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Check on a device which sandwiches may be removed.")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    Console().print(check_sandwiches(torch.device(parser.parse_args().device)))
