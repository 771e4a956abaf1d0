"""What an artifact says about itself, in a JSON file inside of it.

==========  ==========================================================
format      where
==========  ==========================================================
pt2, aoti   ``extra/fxamp.json`` in the archive
onnx        entries of the model's ``metadata_props``: ``fxamp``, and
            ``fxamp.plan`` with the policy and the precision of each
            operator, which would be most of the text, compressed
==========  ==========================================================
"""

from __future__ import annotations

import base64
import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fxamp.errors import ExportError
from fxamp.export.contract import Port

__all__ = ["ENTRY", "Artifact", "add_to_archive", "read_artifact"]

ENTRY = "fxamp.json"
"""The name of the file in an archive."""

_VERSION = 1
_HEAD, _PACKED = "fxamp", "fxamp.plan"
_PLAN = ("policy", "precision")
_STRANGE = "what the artifact says about itself is no text of fxamp"
_ZIP = b"PK\x03\x04"


@dataclass(frozen=True)
class Artifact:
    """What an artifact holds and how it was made.

    Attributes:
        format: ``"pt2"``, ``"aoti"`` or ``"onnx"``.
        model: The class of the model.
        fxamp: The version of fxamp.
        torch: The version of torch.
        device_type: Whose autocast.
        dtype: Its low precision dtype.
        inputs: The tensors that go in.
        outputs: The tensors that come out.
        casts: How many casts a call makes.
        operators: How many operators.
        weight_bytes: What the weights take, each once a dtype that it is used in.
        float32_bytes: What they would take in float32.
        imports: Packages that must be imported before the artifact is loaded.
        findings: Constants and weights that do not fit the low precision dtype, a line each.
        notes: What else differs from the model, a line each.
        policy: The policy with its overrides, as a plan file has it.
        precision: Each operator that has a rule or an override: module, operator, dtypes, rule.
        check: What the check of the written file has found; empty if there was none.
    """

    format: str
    model: str
    fxamp: str
    torch: str
    device_type: str
    dtype: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    casts: int
    operators: int
    weight_bytes: int
    float32_bytes: int
    imports: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    policy: Mapping[str, Any] = field(default_factory=dict, repr=False)
    precision: tuple[str, ...] = field(default=(), repr=False)
    check: str = ""

    def to_json(self) -> str:
        """The text that is stored."""
        return _dumped({"version": _VERSION, **asdict(self)})

    def to_entries(self) -> dict[str, str]:
        """The same for ``metadata_props``."""
        values = json.loads(self.to_json())
        plan = {name: values.pop(name) for name in _PLAN}
        packed = base64.b64encode(zlib.compress(_dumped(plan).encode(), 9)).decode("ascii")
        return {_HEAD: _dumped(values), _PACKED: packed}

    @classmethod
    def from_entries(cls, entries: Mapping[str, str]) -> Artifact | None:
        """What :meth:`to_entries` gave; ``None`` if there is nothing of it.

        Raises:
            ExportError: As :meth:`from_json`.
        """
        if _HEAD not in entries:
            return None
        try:
            plan = json.loads(zlib.decompress(base64.b64decode(entries[_PACKED])))
            return cls.from_json(_dumped(json.loads(entries[_HEAD]) | plan))
        except (ValueError, KeyError, TypeError, zlib.error) as error:
            raise ExportError(f"{_STRANGE}: {error}") from error

    @classmethod
    def from_json(cls, text: str) -> Artifact:
        """What :meth:`to_json` gave.

        Raises:
            ExportError: The text is of a newer version, or something else.
        """
        try:
            values = json.loads(text)
            if values.pop("version") != _VERSION:
                raise ExportError("the artifact was written by a newer fxamp\n  pip install --upgrade fxamp")
            for name in ("inputs", "outputs"):
                values[name] = tuple(Port(**port) for port in values[name])
            for name in ("imports", "findings", "notes", "precision"):
                values[name] = tuple(values[name])
            return cls(**values)
        except (ValueError, KeyError, TypeError) as error:
            raise ExportError(f"{_STRANGE}: {error}") from error

    def __str__(self) -> str:
        made = f"(fxamp {self.fxamp}, torch {self.torch})"
        lines = [
            f"{self.model} as {self.format}, {self.dtype} of {self.device_type} autocast {made}",
            f"  weights    {self.weight_bytes:,} bytes, {self._share()} of float32",
            f"  operators  {self.operators}, casts among them {self.casts}",
        ]
        for title, ports in (("inputs", self.inputs), ("outputs", self.outputs)):
            for index, port in enumerate(ports):
                cost = f"  ({port.cost})" if port.cost else ""
                lines.append(f"  {title if index == 0 else '':9}  {port.name}: {port.dtype}{cost}")
        for title, texts in (("import", self.imports), ("unfit", self.findings), ("note", self.notes)):
            lines += [f"  {title:9}  {text}" for text in texts]
        lines.append(f"  {'check':9}  {self.check or 'none was made'}")
        return "\n".join(lines)

    def _share(self) -> str:
        return f"{self.weight_bytes / self.float32_bytes:.2f}" if self.float32_bytes else "1.00"


def _dumped(values: Mapping[str, Any]) -> str:
    return json.dumps(values, separators=(",", ":"))


def add_to_archive(file: Path, artifact: Artifact) -> None:
    """Put what *artifact* says into an archive of torch, which has one folder at its top."""
    with zipfile.ZipFile(file, "a") as archive:
        top = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{top}/extra/{ENTRY}", artifact.to_json())


def read_artifact(path: str | Path) -> Artifact:
    """What the artifact in the file *path* says about itself.

    Raises:
        ExportError: There is no such file, or fxamp has not written it.
    """
    file = Path(path)
    try:
        with file.open("rb") as stream:
            is_archive = stream.read(4) == _ZIP
        artifact = _of_archive(file) if is_archive else _of_onnx(file)
    except (OSError, zipfile.BadZipFile) as error:
        raise ExportError(f"cannot read {file}: {error}") from error
    if artifact is None:
        raise ExportError(f"{file} says nothing about itself: fxamp.export has not written it")
    return artifact


def _of_archive(file: Path) -> Artifact | None:
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            if name.endswith(f"/extra/{ENTRY}"):
                return Artifact.from_json(archive.read(name).decode("utf-8"))
    return None


def _of_onnx(file: Path) -> Artifact | None:
    try:
        import onnx  # noqa: PLC0415  an extra
    except ModuleNotFoundError as error:
        raise ExportError(
            "reading an ONNX file needs the onnx package\n  pip install 'fxamp[onnx]'"
        ) from error
    try:
        model = onnx.load(str(file), load_external_data=False)
    except Exception as error:
        raise ExportError(f"{file} is neither an archive of torch nor an ONNX file") from error
    return Artifact.from_entries({entry.key: entry.value for entry in model.metadata_props})
