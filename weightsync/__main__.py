"""``python -m weightsync``: the command line."""

from weightsync.cli import main

if __name__ == "__main__":
    main()
