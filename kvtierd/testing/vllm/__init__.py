"""Real vLLM engines on CPUs, with models made here: what the engine tests and the demo with vLLM share."""
