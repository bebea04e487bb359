"""On the PYTHONPATH of what tests start (tests/conftest.py): SIGUSR2 writes what each thread does to stderr, and where
WARM_STARTS is set the program runs in a process that has imported Paddle before (warm_start.py)."""

import faulthandler
import os
import signal

faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
if "WARM_STARTS" in os.environ:
    import warm_start

    warm_start.hand_over()
