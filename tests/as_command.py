"""python as_command.py SCRIPT [argument ...]: runs a test's script as the commands run, which start faster so."""

import runpy
import sys

from paddle_te.upstream import deferred_imports

if __name__ == "__main__":
    deferred_imports.apply()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
