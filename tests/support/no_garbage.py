"""The server of :mod:`processes` imports this first, and looks for no garbage while it imports libraries or ends."""

import atexit
import gc

gc.disable()
atexit.register(gc.freeze)
