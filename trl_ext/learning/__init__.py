"""Learners: a policy with its critic, reference and optimizer, and one update of all of them."""
