"""run_finetune.py with TE's kernels emulated in NumPy (tests/emulated_te.py), for nvgpu's host runtime.

finetune.py FLAG VALUE …
finetune.py dpo FLAG VALUE …    run_dpo.py instead
finetune.py RUNS.json       several runs, a list of such words each, one after another in these processes
"""

import json
import sys
from pathlib import Path

from paddle_te.upstream import deferred_imports

if __name__ == "__main__":
    deferred_imports.apply()
    import paddle

    from paddle_te.hosts.paddlenlp.training import dpo, finetune
    from tests import emulated_te
    from tests.multiprocess.distributed.buckets import several_buckets

    paddle.set_device("nvgpu")
    emulated_te.install()
    several_buckets()
    script, *words = sys.argv
    job = dpo if words[0] == "dpo" else finetune
    words = words[job is dpo :]
    for flags in json.loads(Path(words[0]).read_text()) if words[0].endswith(".json") else [words]:
        sys.argv = [script, *flags]
        with paddle.utils.unique_name.guard():  # parameters are named as in a new process
            job.main()
