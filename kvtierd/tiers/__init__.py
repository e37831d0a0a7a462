"""Where bytes are: CPU memory extents and NVMe segments."""
