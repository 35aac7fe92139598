"""From messages to token ids, and back to calls: templates, control tokens, stop strings."""
