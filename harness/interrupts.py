"""Authority on Ctrl-C during a long run: the first one ends the checking, the second one spoils nothing."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

SAID = b"kda: stopping; results are being written (once more to leave without them)\n"


class Interrupts:
    """What the next Ctrl-C does: it stops the work, or, while results are written, is put off once."""

    def __init__(self):
        self._stopping, self._told = False, False

    def finishing(self) -> None:
        """From here on results are written."""
        self._stopping = True

    def __call__(self, signum: int, frame: object) -> None:
        if self._stopping and not self._told:
            self._told = True
            os.write(2, SAID)  # print is not to be entered twice
            return
        self._stopping = True
        raise KeyboardInterrupt


@contextlib.contextmanager
def handled() -> Iterator[Interrupts]:
    """Inside the block Ctrl-C is handled so; nothing changes outside the main thread, which never gets one."""
    handler = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield handler
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield handler
    finally:
        signal.signal(signal.SIGINT, before)
