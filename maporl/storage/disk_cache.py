"""A disk cache of JSON records by key, such as verdicts of the sandbox. All processes of a user share a SQLite file."""

import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from maporl.errors import UserError
from trl_ext.files.paths import below
from trl_ext.process.waits import SLICE, pause

logger = logging.getLogger(__name__)
_DAMAGED = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
"""SQLite's codes for damaged or foreign files: other columns, a broken page, another format."""
_PATIENCE = 60.0
"""The seconds that other processes may write the file."""
_BATCH = 500
"""The number of keys in a query. SQLite accepts at least 999 parameters."""


class CacheUnusable(UserError, OSError):
    """The cache's folder or file cannot be opened or created."""


def cache_folder() -> Path:
    """Return the cache's folder: ``$MAPORL_CACHE``, or else ``~/.cache/maporl``.

    Raises:
        CacheUnusable: there is neither the variable nor a home folder.
    """
    try:
        return Path(os.environ.get("MAPORL_CACHE") or Path.home() / ".cache" / "maporl")
    except RuntimeError as error:
        raise CacheUnusable(f"the cache has no folder ({error}); set MAPORL_CACHE to one that can be written") from None


class DiskCache:
    """JSON records by key in ``folder/NAME.sqlite``.

    Every call opens the file again, so that threads, forks and other processes may use it too. A damaged file is set
    aside under another name, and a new one takes its place. A record that is damaged, or that ``valid`` refuses, counts
    as unknown and is dropped. If the file cannot be read or written later, the work goes on without it. A warning says
    each of these.

    Raises:
        CacheUnusable: the folder cannot be written, or the file cannot be opened.
    """

    def __init__(self, folder: Path, name: str = "sandbox", valid: Callable[[dict[str, Any]], bool] | None = None):
        self.path, self._valid = below(folder, f"{name}.sqlite"), valid
        try:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                self._create()
            except sqlite3.Error as error:
                if error.sqlite_errorcode & 0xFF not in _DAMAGED:  # it is locked, or the disk is full
                    raise
                aside = self.path.with_name(f"{self.path.name}.damaged-{time.time_ns()}")
                logger.warning(
                    "%s: is damaged (%s); it is now %s, and a new cache begins", self.path, error, aside.name
                )
                self.path.replace(aside)
                self._create()
        except (OSError, sqlite3.Error) as error:
            raise CacheUnusable(
                f"{self.path}: the cache cannot be used ({error}); set MAPORL_CACHE to a folder that "
                "can be written to, remove the file if it is damaged, or switch the cache off"
            ) from error

    def get(self, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the known records among ``keys``, by key."""
        records: dict[str, dict[str, Any]] = {}
        damaged: list[tuple[str]] = []

        def look_up(db: sqlite3.Connection) -> None:
            for start in range(0, len(keys), _BATCH):
                part = keys[start : start + _BATCH]
                marks = ",".join("?" * len(part))
                for key, text in db.execute(f"SELECT key, record FROM verdicts WHERE key IN ({marks})", part):
                    record = self._read(text)
                    if record is None:
                        damaged.append((key,))
                    else:
                        records[key] = record
            if damaged:
                logger.warning("%s: %d damaged records are dropped", self.path, len(damaged))
                db.executemany("DELETE FROM verdicts WHERE key = ?", damaged)

        try:
            self._in_the_file(look_up)
        except sqlite3.Error as error:
            logger.warning("%s: cannot be read (%s); what it holds counts as unknown", self.path, error)
        return records

    def put(self, records: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Add records. A record that another process has added already stays."""
        rows = [(key, json.dumps(record)) for key, record in records]
        try:
            self._in_the_file(lambda db: db.executemany("INSERT OR IGNORE INTO verdicts VALUES (?, ?)", rows))
        except sqlite3.Error as error:
            logger.warning("%s: cannot be written (%s); %d records are not kept", self.path, error, len(rows))

    def _read(self, text: Any) -> dict[str, Any] | None:
        """Return the record in ``text``, or None if it is damaged."""
        try:
            record = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            return None
        return record if isinstance(record, dict) and (self._valid is None or self._valid(record)) else None

    def _create(self) -> None:
        def create(db: sqlite3.Connection) -> None:
            db.execute("CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, record TEXT NOT NULL)")
            db.execute("SELECT key, record FROM verdicts LIMIT 1").fetchall()

        self._in_the_file(create)

    def _in_the_file(self, work: Callable[[sqlite3.Connection], Any]) -> None:
        """Do ``work`` with the file. If another process writes it, wait for that, and begin again."""
        # SQLite itself would wait too, and hear no signals meanwhile
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                with closing(sqlite3.connect(self.path, timeout=SLICE)) as db, db:
                    work(db)
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                    raise
            pause(SLICE / 10)
