"""From a frozen program to files that run without fxamp."""

from fxamp.export.artifact import Artifact, read_artifact
from fxamp.export.export import export

__all__ = ["Artifact", "export", "read_artifact"]
