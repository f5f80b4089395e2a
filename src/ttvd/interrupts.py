"""Ctrl-C and SIGTERM without the loss of work: a batch or run ends first, and handlers are restored."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Tells whether somebody has asked the program to stop.

    Attributes:
        requested: Whether Ctrl-C or SIGTERM has come.
    """

    def __init__(self) -> None:
        self.requested = False


@contextmanager
def defer_interrupts() -> Iterator[Interrupt]:
    """Inside the block, the first Ctrl-C or SIGTERM is only noted; the second one raises `KeyboardInterrupt`.

    The caller looks at ``requested`` between two batches or runs, and stops there. Only the main thread receives
    signals; in other threads nothing changes.

    Example:
        >>> import os
        >>> with defer_interrupts() as interrupt:
        ...     os.kill(os.getpid(), signal.SIGTERM)
        ...     print(interrupt.requested)
        True
    """
    interrupt = Interrupt()

    def note(number: int, frame: FrameType | None) -> None:
        if interrupt.requested:  # somebody is impatient
            raise KeyboardInterrupt
        interrupt.requested = True

    with _handle_signals(note):
        yield interrupt


@contextmanager
def raise_interrupts() -> Iterator[None]:
    """Inside the block, SIGTERM raises `KeyboardInterrupt` as Ctrl-C does, so that `finally` blocks run.

    This module imports nothing heavy: a command enters the block before it loads its libraries, so that a signal in
    the first seconds is handled too.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handle_signals(stop):
        yield


@contextmanager
def delay_interrupts() -> Iterator[None]:
    """Inside the block, Ctrl-C and SIGTERM wait; at its end they go to the handlers that were there before.

    This is for moments in which an exception does harm: libraries that are imported may turn it into an error of their
    own, and a process that is being started would be left without its parent.

    Example:
        >>> with raise_interrupts():
        ...     try:
        ...         with delay_interrupts():
        ...             signal.raise_signal(signal.SIGTERM)
        ...             print("goes on")
        ...     except KeyboardInterrupt:
        ...         print("stops here")
        goes on
        stops here
    """
    came: list[int] = []
    with _handle_signals(lambda number, frame: came.append(number)):
        yield
    for number in came[:1]:
        signal.raise_signal(number)


@contextmanager
def _handle_signals(handler: "signal._HANDLER") -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
