"""The shell around the core: one event loop that feeds it events and runs its commands."""

from kvtierd.runtime.runtime import Runtime
from kvtierd.runtime.sessions import Attached

__all__ = ["Attached", "Runtime"]
