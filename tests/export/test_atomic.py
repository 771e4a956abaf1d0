"""Whoever looks at an artifact's name sees the old one or the new one, whenever the writer is killed."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fxamp.errors import CaptureError, ExportError
from fxamp.export.atomic import atomically, atomically_with_data

ROOT = Path(__file__).resolve().parents[2]
KILLS = 20
BLOCKS, BLOCK = 24, 1 << 19  # what the killed process writes, slowly
NOBODY = 65534

# Writes BLOCKS blocks of one byte each, says where it is, and sleeps so that kills land inside.
WRITER = f"""
import sys, time, types
for name in ("fxamp", "fxamp.export"):  # without what they import: torch takes seconds
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = ["{ROOT}/" + name.replace(".", "/")]
from fxamp.export.atomic import atomically, atomically_with_data
path, byte, pair = sys.argv[1], bytes([int(sys.argv[2])]), sys.argv[3] == "pair"
def write(target):
    with target.open("wb") as file:
        for block in range({BLOCKS}):
            file.write(byte * {BLOCK})
            file.flush()
            print("block", block, flush=True)
            time.sleep(0.003)
if pair:
    with atomically_with_data(path) as names:
        write(names.data)
        names.model.write_text(names.data.name)
        print("written", flush=True)
else:
    with atomically(path) as name:
        write(name)
        print("written", flush=True)
print("done", flush=True)
"""


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _start(path: Path, byte: int, kind: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, path, str(byte), kind],
        stdout=subprocess.PIPE,
        text=True,
    )


def _kill_after(writer: subprocess.Popen[str], line: str, delay: float) -> str:
    """Kill *writer* a moment after it has said *line*; the last that it said."""
    assert writer.stdout is not None
    for said in writer.stdout:
        if said.strip() == line:
            break
    time.sleep(delay)
    writer.send_signal(signal.SIGKILL)
    rest = writer.stdout.read().split("\n")
    writer.wait()
    writer.stdout.close()
    return next((said for said in reversed(rest) if said), line)


def _content(path: Path, kind: str) -> set[int]:
    """The bytes that the artifact is made of, of which it must have one kind and all."""
    data = path.with_name(path.read_text()) if kind == "pair" else path
    content = data.read_bytes()
    assert len(content) == BLOCKS * BLOCK
    return set(content)


@pytest.mark.parametrize("kind", ["file", "pair"])
def test_a_kill_at_any_moment_leaves_the_old_artifact_or_the_new_one(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.onnx"
    writer = _start(path, 0, kind)
    assert writer.communicate()[0].endswith("done\n")
    old, inside, chance = 0, 0, random.Random(6)
    moments = [f"block {chance.randrange(BLOCKS)}" for _ in range(KILLS - 6)] + ["written"] * 6
    for new, moment in enumerate(moments, start=1):
        last = _kill_after(_start(path, new, kind), moment, chance.random() * 0.01)
        found = _content(path, kind)
        assert found in ({old}, {new})
        inside += last != "done"
        if last.startswith("block"):
            assert found == {old}
        if last == "done":
            assert found == {new}
        (old,) = found
    assert inside >= KILLS // 2  # the kills did land inside of a write
    assert _start(path, 255, kind).communicate()[0].endswith("done\n")
    assert _content(path, kind) == {255}
    expected = {"model.onnx"} | ({path.read_text()} if kind == "pair" else set())
    assert _names(tmp_path) == expected  # no leftovers


# --- one file -----------------------------------------------------------------------------------------


def test_the_path_has_the_folder_and_the_suffix_of_the_final_one(tmp_path: Path) -> None:
    with atomically(tmp_path / "model.pt2") as path:
        assert path.parent == tmp_path
        assert path.suffix == ".pt2"
        assert path.name.startswith(".model.pt2.")
        path.write_text("new")
        assert not (tmp_path / "model.pt2").exists()
    assert (tmp_path / "model.pt2").read_text() == "new"
    assert _names(tmp_path) == {"model.pt2"}


def _write_new_and_raise(final: Path, error: BaseException) -> None:
    with atomically(final) as path:
        path.write_text("new")
        raise error


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), OSError(errno.ENOENT, "no")])
def test_what_the_body_raises_goes_through_and_leaves_the_old_file(
    tmp_path: Path, error: BaseException
) -> None:
    (tmp_path / "model.pt2").write_text("old")
    with pytest.raises(type(error)) as raised:
        _write_new_and_raise(tmp_path / "model.pt2", error)
    assert raised.value is error
    assert (tmp_path / "model.pt2").read_text() == "old"
    assert _names(tmp_path) == {"model.pt2"}


def test_a_file_passes_its_permissions_on(tmp_path: Path) -> None:
    final = tmp_path / "model.pt2"
    final.write_text("old")
    final.chmod(0o640)
    with atomically(final) as path:
        path.write_text("new")
    assert stat.S_IMODE(final.stat().st_mode) == 0o640


def test_a_new_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "any").write_text("")
    with atomically(tmp_path / "model.pt2") as path:
        path.write_text("new")
    assert (tmp_path / "model.pt2").stat().st_mode == (tmp_path / "any").stat().st_mode


def test_of_a_symbolic_link_the_file_behind_it_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "v1.pt2").write_text("old")
    link = tmp_path / "model.pt2"
    link.symlink_to("store/v1.pt2")
    with atomically(link) as path:
        path.write_text("new")
    assert link.is_symlink()
    assert (tmp_path / "store" / "v1.pt2").read_text() == "new"
    assert _names(tmp_path / "store") == {"v1.pt2"}


def test_the_next_export_removes_leftovers_but_not_the_files_of_one_that_runs(tmp_path: Path) -> None:
    leftover = tmp_path / ".model.pt2.0123456789abcdef.tmp.pt2"
    others = {".other.pt2.0123456789abcdef.tmp.pt2", ".model.pt2.mine.tmp.pt2", "model.pt2.bak"}
    for name in (*others, leftover.name):
        (tmp_path / name).write_text("half of it")
    with atomically(tmp_path / "model.pt2") as first, atomically(tmp_path / "model.pt2") as second:
        assert not leftover.exists()
        first.write_text("first")
        second.write_text("second")
    assert (tmp_path / "model.pt2").read_text() == "first"  # ends last
    assert _names(tmp_path) == {"model.pt2", *others}


# --- a model with data --------------------------------------------------------------------------------


def _interrupt() -> None:
    raise KeyboardInterrupt


def _write_pair(path: Path, text: str, then: Callable[[], None] = lambda: None) -> str:
    with atomically_with_data(path) as pair:
        pair.data.write_text(text)
        pair.model.write_text(pair.data.name)
        then()
    return pair.data.name


def test_the_model_refers_to_data_of_its_own_and_older_data_goes(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    own = {"model.onnx.data", "model.onnx.notes.data", "other.onnx.0123456789abcdef.data"}
    for name in own:
        (tmp_path / name).write_text("of the user")
    first = _write_pair(path, "old")
    second = _write_pair(path, "new")
    assert first != second
    assert path.read_text() == second
    assert (tmp_path / second).read_text() == "new"
    assert _names(tmp_path) == {"model.onnx", second, *own}


def test_an_interrupt_leaves_the_old_pair(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    name = _write_pair(path, "old")
    with pytest.raises(KeyboardInterrupt):
        _write_pair(path, "new", _interrupt)
    assert path.read_text() == name
    assert _names(tmp_path) == {"model.onnx", name}


def test_an_interrupt_after_the_rename_leaves_the_new_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_cleaning() -> None:
        monkeypatch.setattr(Path, "iterdir", lambda path: _interrupt())

    path = tmp_path / "model.onnx"
    with pytest.raises(KeyboardInterrupt):
        _write_pair(path, "new", stop_cleaning)
    assert (tmp_path / path.read_text()).read_text() == "new"


def test_a_model_without_external_data_leaves_no_data_file(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    _write_pair(path, "old")
    with atomically_with_data(path) as pair:
        pair.model.write_text("all in one")
    assert path.read_text() == "all in one"
    assert _names(tmp_path) == {"model.onnx"}


def test_two_exports_at_once_leave_a_pair(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    with atomically_with_data(path) as outer:
        inner = _write_pair(path, "inner")
        assert outer.data.exists()
        outer.data.write_text("outer")
        outer.model.write_text(outer.data.name)
    assert path.read_text() == outer.data.name
    assert inner not in _names(tmp_path)
    assert (tmp_path / outer.data.name).read_text() == "outer"


# --- what cannot be written -----------------------------------------------------------------------------


@pytest.fixture
def as_user() -> Iterator[Path]:
    """A folder of one's own, as somebody who is not root: root may write anywhere."""
    with tempfile.TemporaryDirectory() as folder:
        if os.geteuid() != 0:
            yield Path(folder)
            return
        os.chown(folder, NOBODY, NOBODY)
        os.seteuid(NOBODY)
        try:
            yield Path(folder)
        finally:
            os.seteuid(0)


both = pytest.mark.parametrize("write", [atomically, atomically_with_data])


def _write(write: Any, path: Path, error: Exception | None = None, size: int = 0) -> None:
    with write(path, size=size):
        if error is not None:
            raise error


@both
def test_a_folder_that_is_not_there(tmp_path: Path, write: Any) -> None:
    with pytest.raises(ExportError, match=r"folder .*there does not exist\n  make it:  mkdir -p"):
        _write(write, tmp_path / "there" / "model.pt2")


@both
def test_a_file_in_the_place_of_a_folder(tmp_path: Path, write: Any) -> None:
    (tmp_path / "there").write_text("")
    with pytest.raises(ExportError, match="does not exist"):
        _write(write, tmp_path / "there" / "model.pt2")


@both
def test_a_folder(tmp_path: Path, write: Any) -> None:
    with pytest.raises(ExportError, match=r"is a folder\n  name a file in it: "):
        _write(write, tmp_path)
    assert not _names(tmp_path)


@both
def test_a_pipe(tmp_path: Path, write: Any) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ExportError, match="no file that could be replaced"):
        _write(write, tmp_path / "pipe")


@both
def test_a_folder_without_permission(as_user: Path, write: Any) -> None:
    as_user.chmod(0o500)
    with pytest.raises(ExportError, match="cannot be written to"):
        _write(write, as_user / "model.pt2")


@both
def test_a_file_that_is_write_protected(as_user: Path, write: Any) -> None:
    (as_user / "model.pt2").write_text("old")
    (as_user / "model.pt2").chmod(0o400)
    with pytest.raises(ExportError, match=r"write-protected\n .*chmod u\+w"):
        _write(write, as_user / "model.pt2")


@both
def test_a_name_that_is_too_long(tmp_path: Path, write: Any) -> None:
    with pytest.raises(ExportError, match="File name too long"):
        _write(write, tmp_path / ("m" * 250 + ".pt2"))


@both
def test_no_room_for_what_is_coming(tmp_path: Path, write: Any) -> None:
    (tmp_path / "model.pt2").write_text("old")
    with pytest.raises(ExportError, match=r"takes 1,048,576,000 MiB, and [\d,]+ MiB are free"):
        _write(write, tmp_path / "model.pt2", size=1_048_576_000 * 2**20)
    assert _names(tmp_path) == {"model.pt2"}


@both
def test_a_full_disk(tmp_path: Path, write: Any) -> None:
    (tmp_path / "model.pt2").write_text("old")
    error = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(ExportError, match="No space left on device") as raised:
        _write(write, tmp_path / "model.pt2", error)
    assert raised.value.__cause__ is error
    assert (tmp_path / "model.pt2").read_text() == "old"
    assert _names(tmp_path) == {"model.pt2"}


@both
def test_a_full_disk_of_which_a_writer_says_so_in_its_own_words(
    tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("unexpected pos 64 vs 0")
    with pytest.raises(RuntimeError) as raised:
        _write(write, tmp_path / "model.pt2", error)
    assert raised.value is error  # there is room
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(ExportError, match="unexpected pos 64 vs 0"):
        _write(write, tmp_path / "model.pt2", error)
    with pytest.raises(CaptureError):
        _write(write, tmp_path / "model.pt2", CaptureError("no matter of the disk"))
