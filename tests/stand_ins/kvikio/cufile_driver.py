"""cuFile's properties."""

import os


def get(name):
    return {"is_gds_available": "FAKE_GDS" in os.environ, "allow_compat_mode": os.environ.get("FAKE_GDS") == "compat"}[name]
