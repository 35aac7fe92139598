"""A verifier served over HTTP from a process of its own: ``python -m reward_server`` or ``maporl serve``."""
