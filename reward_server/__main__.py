"""``python -m reward_server``."""

from reward_server.cli import main

if __name__ == "__main__":
    main()
