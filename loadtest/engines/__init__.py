"""A real daemon under many engine-like clients, with faults: ``python -m loadtest.engines --help``."""
