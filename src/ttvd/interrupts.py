"""Ctrl-C and SIGTERM without the loss of what is being written."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Tells whether the user has asked to stop."""

    def __init__(self) -> None:
        self.asked = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:  # somebody is impatient
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def postpone_interrupts() -> Iterator[Interrupt]:
    """Inside, Ctrl-C and SIGTERM are noted instead of raised, once; the second one is raised as `KeyboardInterrupt`.

    Only the main thread can do so; in others nothing changes.

    Example:
        >>> import os
        >>> with postpone_interrupts() as interrupt:
        ...     os.kill(os.getpid(), signal.SIGTERM)
        ...     print(interrupt.asked)
        True
    """
    interrupt = Interrupt()
    with _handle(interrupt._note):
        yield interrupt


@contextmanager
def raise_interrupts() -> Iterator[None]:
    """Inside, SIGTERM raises `KeyboardInterrupt` as Ctrl-C does, so that processes and files are put in order."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handle(stop):
        yield


@contextmanager
def _handle(handler: "signal._HANDLER") -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
