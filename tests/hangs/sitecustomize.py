"""On the PYTHONPATH of what tests start (tests/conftest.py): SIGUSR2 writes what each thread does to stderr."""

import faulthandler
import signal

faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
