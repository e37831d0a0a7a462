"""Without SGLang there is nothing to collect here: ``make test-sglang`` has an environment with it."""

from __future__ import annotations

import importlib
import importlib.util
import warnings

collect_ignore_glob: list[str] = []
if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob.append("test_*.py")
else:
    with warnings.catch_warnings():  # which are errors in tests, and SGLang's own here
        warnings.simplefilter("ignore")
        importlib.import_module("sglang.srt.managers.cache_controller")
