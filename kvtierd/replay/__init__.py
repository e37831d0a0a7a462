"""Replaying request traces: through the core in virtual time, or through a running daemon."""
