"""What ``kvtierd bench`` measures: a real daemon against the physical limits of the machine, in one run.

Each figure is taken in turn with its limit (a memory copy for shared memory, raw O_DIRECT for NVMe), so that other work on the
machine hits both alike. The client library is used as any engine would use it; nothing here looks into the daemon.
"""
