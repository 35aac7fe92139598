"""One self-contained page of a run, or of several beside each other; the same page while a run goes on."""
