"""stub"""

import os
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomically(path):
    t = Path(path).with_name("." + Path(path).name + ".tmp")
    yield t
    os.replace(t, path)
