"""run_finetune.py with TE's kernels emulated in NumPy (tests/emulated_te.py), for nvgpu's host runtime.

finetune.py FLAG VALUE …
finetune.py RUNS.json       several runs, a list of such words each, one after another in these processes
"""

import json
import sys
from pathlib import Path

from paddle_te.upstream import deferred_imports

if __name__ == "__main__":
    deferred_imports.apply()
    import paddle

    from paddle_te.hosts.paddlenlp.training import finetune
    from tests import emulated_te

    paddle.set_device("nvgpu")
    emulated_te.install()
    script, *words = sys.argv
    for flags in json.loads(Path(words[0]).read_text()) if words[0].endswith(".json") else [words]:
        sys.argv = [script, *flags]
        with paddle.utils.unique_name.guard():  # parameters are named as in a new process
            finetune.main()
