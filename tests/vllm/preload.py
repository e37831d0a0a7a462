"""Imported once by the process that engines are forked from: all that an engine of one process imports, without starting any."""

from __future__ import annotations

import gc

import transformers  # noqa: F401
import vllm.entrypoints.llm
import vllm.v1.engine.core
import vllm.v1.executor.uniproc_executor
import vllm.v1.worker.cpu_worker  # noqa: F401

import kvtierd.connectors.vllm  # noqa: F401

# Nothing of this is garbage: a collection in each child would copy its pages.
gc.collect()
gc.freeze()
