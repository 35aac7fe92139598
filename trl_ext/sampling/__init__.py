"""Sample from one model: prompts in token ids, completions in token ids."""
