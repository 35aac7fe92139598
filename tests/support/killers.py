"""Processes of a run on Ray that are killed while it trains."""

import os
import signal
import threading
import time
from contextlib import contextmanager


@contextmanager
def killed_after(trainer, updates, *pids):
    """Kill processes in the background, as soon as the trainer has made so many updates in the block."""

    def kill():
        while trainer.state.global_step < updates:
            time.sleep(0.01)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    yield
    killer.join()
