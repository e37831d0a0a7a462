"""What Hypothesis makes of a corpus: inputs with bytes changed, put in, taken out, repeated, or joined with others."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

Edit = tuple[str, int, int, bytes]


def apply(data: bytes, edits: Sequence[Edit]) -> bytes:
    """The input after some edits; places are counted round its end."""
    for kind, place, count, piece in edits:
        at = place % (len(data) + 1)
        if kind == "write":
            data = data[:at] + piece + data[at + len(piece) :]
        elif kind == "insert":
            data = data[:at] + piece + data[at:]
        elif kind == "flip" and at < len(data):
            data = data[:at] + bytes([data[at] ^ 1 << count % 8]) + data[at + 1 :]
        elif kind == "cut":
            data = data[:at] + data[at + count :]
        elif kind == "repeat":
            data = data[:at] + data[at : at + 64] * count + data[at + 64 :]
    return data


def changed(corpus: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Inputs made of a corpus."""
    small = st.binary(min_size=1, max_size=8)
    odd = st.sampled_from([b"\0" * 8, b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\x80" * 10, b"[" * 200, b'"', b"{", b"1e999", b"-1"])
    kinds = st.sampled_from(["write", "insert", "flip", "cut", "repeat"])
    edit = st.tuples(kinds, st.integers(0, 1 << 16), st.integers(1, 64), small | odd | st.sampled_from(corpus))
    return st.builds(apply, st.sampled_from(corpus) | st.binary(max_size=64), st.lists(edit, min_size=1, max_size=6))
