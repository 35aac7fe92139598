"""Questions that are asked of several runs, or before one: who plays well with whom, who should share weights, and what
a cluster would do."""
