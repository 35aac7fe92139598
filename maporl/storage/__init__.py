"""Files of a run and the disk cache. Files are written whole or not at all, and never over another run's files."""
