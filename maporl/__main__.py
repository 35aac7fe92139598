"""``python -m maporl``."""

from maporl.cli import main

if __name__ == "__main__":
    main()
