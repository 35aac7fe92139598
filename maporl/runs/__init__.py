"""What the commands do: train, evaluate, play, push. Each function may be called from Python as well."""
