"""The server of :mod:`processes` imports this first, and looks for no garbage while it imports libraries."""

import gc

gc.disable()
