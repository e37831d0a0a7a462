"""Settings; FAKE_GDS says whether there is GPUDirect Storage."""

import contextlib
import os

_settings = {"compat_mode": 2, "num_threads": 1, "task_size": 4 << 20, "gds_threshold": 16384, "bounce_buffer_size": 16 << 20}


def set(settings):
    _settings.update(settings)
    return contextlib.nullcontext()


def get(name):
    return _settings[name]


def is_compat_mode_preferred():
    return "FAKE_GDS" not in os.environ
