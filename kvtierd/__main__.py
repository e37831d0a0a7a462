"""``python -m kvtierd`` is the ``kvtierd`` command."""

from kvtierd.cli import main

if __name__ == "__main__":
    main()
