"""Moving bytes between tiers."""
