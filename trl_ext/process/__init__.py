"""The process and its devices: what others of the run do, memory, random states, signals, threads."""
