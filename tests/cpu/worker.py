"""A worker process for tests: joins, then does what it reads line by line (JSON), and answers each line with one."""

import json
import os
import sys

from kvtierd.client.extents import ExtentMap
from kvtierd.errors import KvtierdError


def main() -> None:
    """Serve standard input until it ends."""
    arguments = json.loads(sys.argv[1])
    extents = ExtentMap(arguments["path"], bytes.fromhex(arguments["token"]), arguments["shard"], arguments["pins"], 10.0)
    held: list[memoryview] = []

    def serve(what: str, *rest: object) -> object:
        slot = int(str(rest[0])) if rest else 0
        if what == "write":
            text = str(rest[1]).encode()
            extents.view(slot, len(text))[:] = text
        elif what == "read":
            return bytes(extents.view(slot, int(str(rest[1])))).decode()
        elif what == "hold":
            held.append(extents.view(slot))
        elif what == "read held":
            return bytes(held[-1][:4]).hex()
        elif what == "drop":
            held.clear()
        elif what == "mapped":
            return sorted(extents.mapped_extents)
        elif what == "fork":
            child = os.fork()
            if child == 0:
                fork_child()
            return child
        return "ok"

    def fork_child() -> None:
        sys.stdin.close()
        while True:
            os.read(slow_pipe, 1)

    slow_pipe, _keep_open = os.pipe()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        try:
            answer = serve(*json.loads(line))
        except KvtierdError as e:
            answer = f"{type(e).__name__}: {e}"
        print(json.dumps(answer), flush=True)


main()
