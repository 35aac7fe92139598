"""A sandbox for Python that nobody has read, such as the programs from which TinyGSM takes its labels."""
