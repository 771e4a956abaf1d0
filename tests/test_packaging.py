"""What users install: the wheel has every package, and nothing under the name ``passes``.

Wheels are built from a copy, without network: setuptools leaves a ``build`` folder behind, and a
file that was deleted since would come back from there.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import fxamp

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", "fxamp", "passes")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("source")
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    python("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an otherwise empty venv that has the wheel and sees this one's torch."""
    venv = tmp_path_factory.mktemp("venv")
    python("-m", "venv", "--without-pip", venv)
    interpreter = venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    python("-m", "pip", "--python", interpreter, "install", "--no-deps", "--no-index", wheel)
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    found = next(venv.rglob("site-packages"))
    (found / "borrowed.pth").write_text("\n".join(sorted(paths)), encoding="utf-8")
    return interpreter


def test_the_wheel_has_the_modules_of_the_source_tree_and_no_others(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.endswith(".py")}
    files = {ROOT / "fxamp": "fxamp", ROOT / "passes": "fxamp/passes"}
    there = {
        f"{name}/{file.relative_to(folder).as_posix()}"
        for folder, name in files.items()
        for file in folder.rglob("*.py")
    }
    there = {name for name in there if "__pycache__" not in name}
    assert packed == there, "the list of packages in pyproject.toml is not that of the folders"


def test_the_wheel_says_that_it_is_typed_and_under_which_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "fxamp/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names} == {"fxamp", f"fxamp-{fxamp.__version__}.dist-info"}


def test_a_source_distribution_makes_the_same_wheel(
    source: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("sdist")
    python("-m", "build", "--no-isolation", "--outdir", folder, source)  # the wheel from the sdist
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(folder / wheel.name) as other:
        assert set(one.namelist()) == set(other.namelist())


def test_an_installed_wheel_imports_from_another_folder(installed: Path, tmp_path: Path) -> None:
    code = "import fxamp, fxamp.passes; print(fxamp.__version__); print(fxamp.passes.__file__)"
    version, file = python("-c", code, interpreter=installed, folder=tmp_path).split()
    assert version == fxamp.__version__
    assert installed.parent.parent in Path(file).parents


def test_an_installed_wheel_leaves_the_name_passes_free(installed: Path, tmp_path: Path) -> None:
    code = "import importlib.util; print(importlib.util.find_spec('passes'))"
    assert python("-c", code, interpreter=installed, folder=tmp_path).split() == ["None"]


def test_an_installed_wheel_is_a_backend_of_torch_compile(installed: Path, tmp_path: Path) -> None:
    code = (
        "import torch, torch._dynamo; assert 'fxamp' in torch._dynamo.list_backends();"
        "compiled = torch.compile(torch.nn.Linear(4, 2), backend='fxamp', options={'dtype': torch.bfloat16});"
        "print(compiled(torch.ones(3, 4)).dtype)"
    )
    assert python("-c", code, interpreter=installed, folder=tmp_path).split() == ["torch.bfloat16"]


def test_the_folder_passes_is_not_a_package_of_its_own() -> None:
    with pytest.raises(subprocess.CalledProcessError) as failure:
        python("-c", "import passes", folder=ROOT)
    assert "ImportError" in failure.value.stdout
    assert "fxamp.passes" in failure.value.stdout


def test_the_link_to_the_passes_is_relative() -> None:
    link = ROOT / "fxamp" / "passes"
    if not link.is_symlink():
        pytest.skip("a checkout without links, or an installed fxamp")
    assert link.readlink() == Path("..", "passes")


def python(
    *arguments: str | Path, interpreter: str | Path = sys.executable, folder: Path | None = None
) -> str:
    """The output of the interpreter, errors included; raises ``CalledProcessError`` on failure."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    completed = subprocess.run(
        [interpreter, *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if completed.returncode:
        print(completed.stdout)  # noqa: T201  (pytest shows it with the failure)
    completed.check_returncode()
    return completed.stdout
