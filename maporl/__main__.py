"""Run the command line: ``python -m maporl``."""

from maporl.cli.main import main

if __name__ == "__main__":
    main()
