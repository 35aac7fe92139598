"""A verifier served from a process of its own. Not written yet: ``python -m reward_server`` says so and exits."""
