"""The version of fxamp, as ``pyproject.toml`` has it."""

__all__ = ["__version__"]

__version__ = "0.1.0"
