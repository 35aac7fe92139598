"""A sandbox for Python that nobody has read: code of data sets, of models, of tools."""
