"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# How long a test takes says how busy the machine is.
settings.register_profile("kvtierd", deadline=None)
settings.load_profile("kvtierd")
