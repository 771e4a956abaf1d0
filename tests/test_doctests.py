"""The examples in docstrings, of every module.

Modules are found by name: by path, the files of ``passes/`` would be imported a second time.
"""

import doctest
import importlib
import pkgutil

import pytest

import fxamp

MODULES = sorted(module.name for module in pkgutil.walk_packages(fxamp.__path__, "fxamp."))


@pytest.mark.parametrize("name", ["fxamp", *MODULES])
def test_examples_in_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_the_modules_of_the_linked_folder_are_among_them() -> None:
    assert "fxamp.passes" in MODULES
    assert "fxamp.policy.dispatcher" in MODULES
