"""Write an artifact so that whoever looks at its name, at any moment, sees the old one or the new one.

One file: it is written under another name in the same folder, flushed to the disk and renamed; a rename is
one step for everybody who looks.

A model with external data is two files, and no file system renames two at once.  So the data gets a name
that no other export ever has, ``model.onnx.<tag>.data``; it is flushed to the disk first, and then the model
that refers to it is renamed into place: the old model goes on to find the old data, the new model the new.

===================================  =====================================================================
where a run is killed                what is there
===================================  =====================================================================
while it writes                      the old artifact; a temporary or a data file that nobody refers to
between the rename and the cleaning  the new artifact; the old data file
===================================  =====================================================================

The next export removes such leftovers, and leaves alone the files of an export that runs at the same time:
those are locked, and the system drops the lock of a process that dies.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fxamp.errors import ExportError, FxampError

try:
    import fcntl
except ImportError:  # Windows: no locks, so leftovers stay
    fcntl = None  # type: ignore[assignment]

__all__ = ["Pair", "atomically", "atomically_with_data"]

_TAG = "[0-9a-f]{16}"
_FULL = 2**16  # bytes that are free on a full disk
# What a file system says of a file that is all right, but for which it has no room or no permission.
_REFUSED = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM,
    errno.ENAMETOOLONG,
)  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Where to write a model and its external data.

    Attributes:
        model: The temporary name of the model, in the folder where it will be.
        data: The name of the data file, for good: the model refers to it as ``data.name``.
    """

    model: Path
    data: Path


@contextmanager
def atomically(path: str | Path, *, size: int = 0) -> Iterator[Path]:
    """A path to write to in the place of *path*, which is replaced if and only if the body succeeds.

    The path is in the same folder and has the same suffix; there is an empty file.  Of a symbolic link the
    file that it points to is replaced; a file that was there before passes its permissions on.

    Args:
        path: The final name.
        size: How many bytes the artifact takes at least.  Where the disk does not have them, that is an error
            before anything is written: torch's writer of archives ends the process on a full disk.

    Raises:
        ExportError: There is no such folder, it cannot be written to, *path* is a folder or another thing
            that is no file, or the disk is full.  What the body raises otherwise goes through.
    """
    final = _checked(path)
    _remove_leftovers(final)
    _check_room(final, size)
    temporary = _temporary(final)
    with _refusals(final), _reserved(temporary, temporary):
        yield temporary
        _put(temporary, final)


@contextmanager
def atomically_with_data(path: str | Path, *, size: int = 0) -> Iterator[Pair]:
    """As :func:`atomically`, for a model that refers to a file of external data in its folder.

    A body that leaves the data file empty has a model without external data.  Data files of earlier exports
    to *path* are removed once the new model is in place.

    Args:
        path: The final name of the model.
        size: As for :func:`atomically`, of both files.

    Raises:
        ExportError: As for :func:`atomically`.
    """
    final = _checked(path)
    _remove_leftovers(final)
    _check_room(final, size)
    temporary = _temporary(final)
    data = final.with_name(f"{final.name}.{secrets.token_hex(8)}.data")
    with _refusals(final), _reserved(temporary, temporary), _reserved(data, temporary):
        yield Pair(temporary, data)
        if data.stat().st_size == 0:
            data.unlink()
        else:
            _copy_mode(final, data)
            _flush(data)
            _flush_folder(final.parent)
        with _alone_in(final.parent):
            _put(temporary, final)
            _remove_unlocked(final, re.compile(rf"{re.escape(final.name)}\.{_TAG}\.data"), spare=data)


# --- where to -----------------------------------------------------------------------------------------


def _checked(path: str | Path) -> Path:
    """The file that *path* names, behind symbolic links."""
    final = Path(os.path.realpath(path))
    if final.is_dir():
        raise ExportError(f"{path} is a folder\n  name a file in it:  {Path(path) / 'model.pt2'}")
    if final.exists() and not final.is_file():
        raise ExportError(f"{path} is there and is no file that could be replaced")
    if not final.parent.is_dir():
        raise ExportError(f"the folder {final.parent} does not exist\n  make it:  mkdir -p '{final.parent}'")
    if not _allows(final.parent, os.W_OK | os.X_OK):
        raise ExportError(f"the folder {final.parent} cannot be written to\n  write to another one")
    if final.exists() and not _allows(final, os.W_OK):
        raise ExportError(f"{path} is write-protected\n  write to another name, or:  chmod u+w '{path}'")
    return final


def _allows(path: Path, mode: int) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def _check_room(final: Path, size: int) -> None:
    free = shutil.disk_usage(final.parent).free
    if size > free:
        raise ExportError(
            f"{final} takes {size / 2**20:,.0f} MiB, and {free / 2**20:,.0f} MiB are free on that disk\n"
            "  the artifact that is there stays until the new one is complete: both need room"
        )


def _temporary(final: Path) -> Path:
    """With the suffix of *final*, by which writers know the format."""
    return final.with_name(f".{final.name}.{secrets.token_hex(8)}.tmp{final.suffix}")


@contextmanager
def _refusals(final: Path) -> Iterator[None]:
    """Say what the file system refuses in terms of the artifact."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch's writer has no errno
        free = shutil.disk_usage(final.parent).free
        refused = isinstance(error, OSError) and error.errno in _REFUSED
        if isinstance(error, FxampError) or (not refused and free > _FULL):
            raise
        raise ExportError(
            f"{final} cannot be written: {error}\n"
            f"  {free / 2**20:,.0f} MiB are free on that disk; what was there before is still there"
        ) from error


# --- the steps ----------------------------------------------------------------------------------------


@contextmanager
def _reserved(path: Path, temporary: Path) -> Iterator[None]:
    """An empty, locked file at *path*; removed where the body raises, an interrupt too.

    Once *temporary* has been renamed it stays: it belongs to the artifact.
    """
    with path.open("xb") as file:
        if fcntl is None:
            file.close()  # a file that is open could not be renamed there
        else:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        except BaseException:
            if temporary.exists():
                path.unlink(missing_ok=True)
            raise


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Let no other export rename into *folder* meanwhile: its data would be taken for that of an old one."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _put(temporary: Path, final: Path) -> None:
    _copy_mode(final, temporary)
    _flush(temporary)
    temporary.replace(final)
    _flush_folder(final.parent)


def _copy_mode(final: Path, new: Path) -> None:
    if final.exists():
        shutil.copymode(final, new)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush_folder(folder: Path) -> None:
    """Make the names in *folder* durable, where the system has a way to."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- leftovers ----------------------------------------------------------------------------------------


def _remove_leftovers(final: Path) -> None:
    name, suffix = re.escape(final.name), re.escape(final.suffix)
    _remove_unlocked(final, re.compile(rf"\.{name}\.{_TAG}\.tmp{suffix}"))


def _remove_unlocked(final: Path, pattern: re.Pattern[str], spare: Path | None = None) -> None:
    """Remove the files beside *final* that match *pattern* and that no running export has."""
    for path in list(final.parent.iterdir()):
        if path != spare and pattern.fullmatch(path.name) and not _is_locked(path):
            with suppress(OSError):  # somebody else's, or gone: no reason to fail an export
                path.unlink()


def _is_locked(path: Path) -> bool:
    """Whether a running export has *path*, or may have it."""
    if fcntl is None:
        return True
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)
