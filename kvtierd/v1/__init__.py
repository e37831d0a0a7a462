"""Generated from proto/; `make proto` makes it again."""
