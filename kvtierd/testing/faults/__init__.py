"""The real daemon on real files under faults: SIGKILLs at random moments, and a disk below it that fails, lies or loses power.

``python -m kvtierd.testing.faults --kills 300`` runs a campaign. :mod:`.disk` alone serves tests of single faults.
"""
