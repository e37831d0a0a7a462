"""Attach streams without a gRPC library: HTTP/2 frames by hand, so that one process can offer far more calls than a daemon takes.

Only what these streams need: one stream a connection, headers without compression, flow control both ways, no TLS.
"""

from __future__ import annotations

import socket
import struct

from kvtierd.v1 import kvtier_pb2 as pb

DATA, HEADERS, RST, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 1
END_HEADERS = 4
CREDIT = 1 << 20
"""Bytes that the daemon may send beyond what was acknowledged."""
MAX_FRAME = 16_384
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def header(name: str, value: str) -> bytes:
    """One header field: literal, never indexed, not compressed."""
    assert max(len(name), len(value)) < 127
    return b"\x10" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


class RawStream:
    """One Attach stream on a connection of its own."""

    def __init__(self, path: str, hello: pb.Hello) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._in = bytearray()
        self._message = bytearray()
        self._out = bytearray()
        self._room = 65_535
        self._room_stream = 65_535
        self._initial = 65_535
        self._taken = 0
        self.closed = False
        fields = [
            (":method", "POST"), (":scheme", "http"), (":path", "/kvtierd.v1.KvTierService/Attach"), (":authority", "localhost"),
            ("content-type", "application/grpc"), ("te", "trailers"),
        ]  # fmt: skip
        settings = struct.pack(">HI", 4, CREDIT)
        self._put(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", CREDIT - 65_535)))
        self._put(frame(HEADERS, END_HEADERS, 1, b"".join(header(*f) for f in fields)))
        self._socket.setblocking(False)
        assert self.send(pb.AttachRequest(hello=hello).SerializeToString())

    def fileno(self) -> int:
        return self._socket.fileno()

    def _put(self, raw: bytes) -> None:
        self._out += raw
        self.flush()

    def flush(self) -> None:
        """Give the kernel what it takes."""
        try:
            while self._out:
                del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True

    @property
    def clogged(self) -> bool:
        """True while the kernel has not taken everything."""
        return bool(self._out)

    def send(self, message: bytes) -> bool:
        """Send one message. False when the daemon's flow control has no room for it."""
        size = len(message) + 5
        if self.closed or size > min(self._room, self._room_stream) or len(self._out) > CREDIT:
            return False
        self._room -= size
        self._room_stream -= size
        raw = b"\0" + len(message).to_bytes(4, "big") + message
        self._put(b"".join(frame(DATA, 0, 1, raw[at : at + MAX_FRAME]) for at in range(0, size, MAX_FRAME)))
        return True

    def receive(self) -> list[pb.AttachResponse]:
        """Messages that have come."""
        try:
            raw = self._socket.recv(1 << 20)
        except BlockingIOError:
            return []
        except OSError:
            raw = b""
        if not raw:
            self.closed = True
            return []
        self._in += raw
        at = 0
        while len(self._in) - at >= 9:
            length = int.from_bytes(self._in[at : at + 3], "big")
            if len(self._in) - at < 9 + length:
                break
            self._frame(self._in[at + 3], self._in[at + 4], self._in[at + 5 : at + 9], bytes(self._in[at + 9 : at + 9 + length]))
            at += 9 + length
        del self._in[:at]
        if self._taken > CREDIT // 2:
            update = struct.pack(">I", self._taken)
            self._taken = 0
            self._put(frame(WINDOW_UPDATE, 0, 0, update) + frame(WINDOW_UPDATE, 0, 1, update))
        return self._messages()

    def _messages(self) -> list[pb.AttachResponse]:
        found = []
        at = 0
        while len(self._message) - at >= 5:
            length = int.from_bytes(self._message[at + 1 : at + 5], "big")
            if len(self._message) - at < 5 + length:
                break
            found.append(pb.AttachResponse.FromString(bytes(self._message[at + 5 : at + 5 + length])))
            at += 5 + length
        del self._message[:at]
        return found

    def _frame(self, kind: int, flags: int, stream: bytes, payload: bytes) -> None:
        if kind == DATA:
            self._taken += len(payload)
            self._message += payload
        elif kind == SETTINGS and not flags & ACK:
            for at in range(0, len(payload), 6):
                key, value = struct.unpack_from(">HI", payload, at)
                if key == 4:
                    self._room_stream += value - self._initial
                    self._initial = value
            self._put(frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            self._put(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            more = struct.unpack(">I", payload)[0]
            if int.from_bytes(stream, "big"):
                self._room_stream += more
            else:
                self._room += more
        elif kind in (RST, GOAWAY) or (kind == HEADERS and flags & END_STREAM):
            self.closed = True

    def close(self) -> None:
        self._socket.close()
        self.closed = True
