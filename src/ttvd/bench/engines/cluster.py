"""The way to a Ray cluster."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def connect(address: str | None, cores: int | None = None) -> bool:
    """Connect to a Ray cluster unless this process is connected to one.

    Args:
        address: ``"auto"`` or ``"HOST:PORT"``; without it, one is started on this machine.
        cores: Of the one that is started; all of the machine unless given.

    Returns:
        Whether a connection was made, which the caller must end.

    Raises:
        ConnectionError: No cluster answers.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody asked for a report to Ray's makers
    # Ray prints pages about lost workers and nodes into the progress; the events say it in a sentence.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    import ray

    if ray.is_initialized():
        return False
    where: dict[str, Any] = {"address": address}
    if address is None:
        # "local": never a cluster that happens to run here.
        where = {"address": "local", "include_dashboard": False, "num_cpus": cores}
    else:
        _check_address(address)
    with _same_signals():
        try:
            ray.init(**where, log_to_driver=False, logging_level="ERROR")
        except ConnectionError as error:
            raise ConnectionError(f"no Ray cluster answers at {address}: {error}") from error
    return True


def _check_address(address: str) -> None:
    """Ray itself would try for minutes to reach an address where nobody is."""
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError(
            f"the address of a Ray cluster is auto or HOST:PORT, as in 10.0.0.1:6379; got {address!r}"
        )
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise ConnectionError(
            f"no Ray cluster answers at {address} ({error}); `ray start --head` prints the address of a new one"
        ) from error


@contextmanager
def _same_signals() -> Iterator[None]:
    """Ray puts its own handlers in the place of the caller's; this puts them back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
