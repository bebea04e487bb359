"""On the PYTHONPATH of what tests start (tests/conftest.py): SIGUSR2 writes what each thread does to stderr.

Where WARM_STARTS is set the program runs in a process that has imported Paddle before (warm_start.py). Where
DEFERRED_IMPORTS is set a test's own program imports PaddleNLP as our commands do, in a quarter of the time: without the
packages that training does not use, and without looking for garbage.
"""

import atexit
import faulthandler
import gc
import importlib.util
import os
import signal

faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
if "WARM_STARTS" in os.environ:
    import warm_start

    warm_start.hand_over()
if "DEFERRED_IMPORTS" in os.environ:
    gc.set_threshold(100_000, 50)  # objects: there is no garbage in what is imported
    atexit.register(gc.freeze)  # nor need any be freed in the end
    if importlib.util.find_spec("paddlenlp"):
        from paddle_te.upstream import deferred_imports

        deferred_imports.apply()
