"""What each process of the launcher's jobs runs. In a folder of their own, which Python puts on the path of modules."""

import importlib

from paddle_te.runs import screen
from paddle_te.upstream import deferred_imports


def run(module):
    """Calls the main() of `module`, which may import Paddle and PaddleNLP: neither may be imported before."""
    screen.before_imports()
    deferred_imports.apply()
    importlib.import_module(module).main()
