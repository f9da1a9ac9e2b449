"""Authority on processes whose parent is gone: they end with it, whatever they are doing."""

import os
import threading
import time

SECONDS = 1.0  # between two looks


def end_with_parent() -> None:
    """From now on this process ends soon after its parent, however that ended: a pool's queue has no end that its
    workers would see, and a call that hangs reads no pipe.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
