"""A disk cache of JSON records by key, such as verdicts of the sandbox. All processes of a user share a SQLite file."""

import json
import os
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from maporl.errors import UserError

_BATCH = 500
"""The number of keys in a query. SQLite accepts at least 999 parameters."""


def cache_folder() -> Path:
    """Return the cache's folder: ``$MAPORL_CACHE``, or else ``~/.cache/maporl``."""
    return Path(os.environ.get("MAPORL_CACHE") or Path.home() / ".cache" / "maporl")


class CacheUnusable(UserError, OSError):
    """The cache's file cannot be opened or created."""


class DiskCache:
    """JSON records by key in ``folder/NAME.sqlite``.

    Every call opens the file again, so that threads, forks and other processes may use it too.

    Raises:
        CacheUnusable: the folder cannot be written, or the file is not such a cache.
    """

    def __init__(self, folder: Path, name: str = "sandbox"):
        self.path = folder / f"{name}.sqlite"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with closing(self._open()) as db, db:
                db.execute("CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, record TEXT NOT NULL)")
        except (OSError, sqlite3.Error) as error:
            raise CacheUnusable(
                f"{self.path}: the cache cannot be used ({error}); set MAPORL_CACHE to a folder that "
                "can be written to, remove the file if it is damaged, or switch the cache off"
            ) from error

    def get(self, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the known records among ``keys``, by key."""
        found: dict[str, dict[str, Any]] = {}
        with closing(self._open()) as db:
            for start in range(0, len(keys), _BATCH):
                part = keys[start : start + _BATCH]
                marks = ",".join("?" * len(part))
                rows = db.execute(f"SELECT key, record FROM verdicts WHERE key IN ({marks})", part)
                found.update((key, json.loads(record)) for key, record in rows)
        return found

    def put(self, records: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Add records. A record that another process has added already stays."""
        with closing(self._open()) as db, db:
            rows = [(key, json.dumps(record)) for key, record in records]
            db.executemany("INSERT OR IGNORE INTO verdicts VALUES (?, ?)", rows)

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, timeout=60)  # seconds to wait for another writer
