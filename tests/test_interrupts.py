"""Ctrl-C and SIGTERM: the first one waits, the second one does not, and handlers are restored."""

import os
import signal
import threading
from collections.abc import Callable

import pytest

from ttvd.interrupts import SIGNALS, defer_interrupts, raise_interrupts


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_waits_and_the_second_raises(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    requested = []
    with defer_interrupts() as interrupt:
        for _ in range(2):
            requested.append(interrupt.requested)
            if interrupt.requested:
                with pytest.raises(KeyboardInterrupt):
                    send(number)
            else:
                send(number)
    assert requested == [False, True]
    assert [signal.getsignal(each) for each in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_can_raise_at_once(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with pytest.raises(KeyboardInterrupt), raise_interrupts():
        send(number)
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_a_block_that_defers_may_stand_inside_one_that_raises() -> None:
    with raise_interrupts():
        outer = signal.getsignal(signal.SIGTERM)
        with defer_interrupts() as interrupt:
            send(signal.SIGTERM)
        assert interrupt.requested
        assert signal.getsignal(signal.SIGTERM) is outer


@pytest.mark.parametrize("block", [defer_interrupts, raise_interrupts])
def test_other_threads_change_no_handler(block: Callable[[], object]) -> None:
    before, seen = signal.getsignal(signal.SIGTERM), list[object]()

    def enter() -> None:
        with block():  # type: ignore[attr-defined]
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]
