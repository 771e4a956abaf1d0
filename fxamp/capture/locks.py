"""One at a time: torch keeps the stack of pre-dispatch modes once per process."""

from __future__ import annotations

import threading

__all__ = ["pre_dispatch_lock"]

pre_dispatch_lock = threading.RLock()
"""Held for as long as a pre-dispatch mode is on."""
