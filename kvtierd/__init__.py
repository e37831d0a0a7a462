"""kvtierd: a daemon that keeps LLM KV cache blocks in HBM, CPU memory and NVMe for vLLM and other engines."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvtierd")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

PROTOCOL_VERSION = 1
"""Version of the gRPC and descriptor-socket protocol. A daemon serves this version and the one before."""
