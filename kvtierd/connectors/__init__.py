"""What lets engines use kvtierd: each connector imports its engine only inside its own package."""
