"""Stores and processes for tests, the demo and the benchmarks."""
