"""The backend ``tinker``: policies are LoRA adapters of a service that speaks the Tinker API, which samples from them
and computes their gradients. Losses are computed here, on log-probabilities.

It needs the extra ``tinker``; docs/howto/tinker.md says what to write.
"""
