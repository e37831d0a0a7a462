"""The pure core: policy and state of all tiers, without I/O, clock, threads or randomness."""
