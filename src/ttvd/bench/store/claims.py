"""Who is doing which run: two processes must not do the same, and a dead one must not block anybody."""

import os
import socket
import sqlite3
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Self

LEASE = 120.0
"""Seconds after which a claim that was not renewed is free."""


@dataclass(frozen=True)
class Owner:
    """A process that does runs.

    Attributes:
        host: The machine, and the space of process numbers on it (containers have their own).
        pid: Number of the process.
        started: When it started, in seconds since the machine did; tells it from a later process of the same
            number. 0 where the system does not tell.

    Example:
        >>> Owner.current().is_alive()
        True
    """

    host: str
    pid: int
    started: float

    @classmethod
    def current(cls) -> Self:
        """This process."""
        state = _read_state(os.getpid())
        return cls(_name_host(), os.getpid(), 0.0 if state is None else state[1])

    def is_alive(self) -> bool:
        """False if the process is certainly gone; only processes of this machine can be asked."""
        if self.host != _name_host() or os.name != "posix":
            return True
        try:
            os.kill(self.pid, 0)  # no signal: only asks
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass  # it is there, and somebody else's
        state = _read_state(self.pid)
        return state is None or (state[0] not in "ZX" and state[1] == self.started)


def claim(db: sqlite3.Connection, keys: Iterable[str], owner: Owner, now: float) -> set[str]:
    """Take those of the runs that are neither done nor held by another living owner; within a transaction."""
    done = {key for (key,) in db.execute("SELECT key FROM runs")}
    ours = set(keys) - done - (held_keys(db, now) - _keys_of(db, owner))
    db.executemany(
        "REPLACE INTO claims VALUES (?, ?, ?, ?, ?)", [(key, *astuple(owner), now) for key in ours]
    )
    return ours


def held_keys(db: sqlite3.Connection, now: float) -> set[str]:
    """Runs that a living owner holds."""
    # The size of the difference: a clock that was set back must not hold them for ever.
    alive = cache(Owner.is_alive)
    claims = db.execute("SELECT key, host, pid, started, renewed FROM claims").fetchall()
    return {key for key, *owner, renewed in claims if abs(now - renewed) <= LEASE and alive(Owner(*owner))}


def renew(db: sqlite3.Connection, owner: Owner, now: float) -> None:
    """Keep all claims of an owner for another lease."""
    db.execute(
        "UPDATE claims SET renewed = ? WHERE host = ? AND pid = ? AND started = ?", (now, *astuple(owner))
    )


def release(db: sqlite3.Connection, owner: Owner, keys: Iterable[str] | None) -> None:
    """Give up some claims of an owner, or all."""
    ours = _keys_of(db, owner)
    given = ours if keys is None else ours & set(keys)
    db.executemany("DELETE FROM claims WHERE key = ?", [(key,) for key in given])


def _keys_of(db: sqlite3.Connection, owner: Owner) -> set[str]:
    query = "SELECT key FROM claims WHERE host = ? AND pid = ? AND started = ?"
    return {key for (key,) in db.execute(query, astuple(owner))}


@cache
def _name_host() -> str:
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()
    return f"{socket.gethostname()} {space}"


def _read_state(pid: int) -> tuple[str, float] | None:
    """State letter and time of start of a process, where the system tells."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name of the program comes second, in brackets, and may hold anything.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19]) / os.sysconf("SC_CLK_TCK")
