"""A whole daemon in one process, on a clock of its own, over a disk that lies, with everything decided by one seed.

What runs is the daemon's own code from the runtime down: sessions, core, executor, the store with its journals, snapshots and
recovery, and real shared memory. Simulated are time, threads (one runs at a time, and which one is drawn), and the file system.
``docs/simulation.md`` says how to run it and how to read what it prints.
"""
