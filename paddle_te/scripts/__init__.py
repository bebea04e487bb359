"""What each process of the launcher's jobs runs. In a folder of their own, which Python puts on the path of modules.

All commands that need Paddle begin with `run`.
"""

import importlib

from paddle_te.runs import screen
from paddle_te.upstream import deferred_imports


def run(module):
    """What the main() of `module` returns, which may import Paddle and PaddleNLP: neither may be imported before."""
    screen.before_imports()
    deferred_imports.apply()
    return importlib.import_module(module).main()
