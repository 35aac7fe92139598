"""A Hugging Face model and its adapters: reading weights, and forwards at the sampled tokens."""
