"""Making a verifier, a model that scores answers: sampling answers, balancing them, training.

What a trained verifier is, and how a run or a server asks it for scores, is in :mod:`maporl.rewards.verifier`.
"""
