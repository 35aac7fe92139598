"""Files that a crash leaves whole: atomic writes, the manifest, the lock, checkpoints in a folder."""
