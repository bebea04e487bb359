"""Losses of a recipe of PaddleFormers in layouts of several GPUs beside one GPU: the same random weights, the same
random tokens, the same global batch of four sequences.

    python tools/benchmark/formers_layouts.py PYTHON FOLDER [--gpus 2] [--steps 20] [--precision fp8] [--backend te]

PYTHON: the interpreter of an environment with PaddleFormers (docs/paddleformers.md). FOLDER: for all that the runs
write, which must not be there. Prints each layout's losses. Exit status: 1 if a run failed, or if a layout's mean loss
differs from one GPU's by more than --tolerance.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout, installed or not

from paddle_te import configs  # noqa: E402
from tools.benchmark import formers, hosts  # noqa: E402

BATCH, TOKENS = 4, 1024  # sequences of a step, tokens of a sequence at most
TP, PP = "tensor_model_parallel_size=2", "pipeline_model_parallel_size=2"
# {layout: (processes, how many of them have sequences of their own, lines of the recipe)}
LAYOUTS = {
    "one GPU": (1, 1, []),
    "TP 2": (2, 1, [TP]),
    "TP 2, sequence parallelism": (2, 1, [TP, "sequence_parallel=true"]),
    "PP 2": (2, 1, [PP]),
    "sharding stage 1": (2, 2, ["sharding=stage1"]),
    "sharding stage 2": (2, 2, ["sharding=stage2"]),
    "sharding stage 3": (2, 2, ["sharding=stage3"]),
    "TP 2, sequence parallelism, sharding stage 1": (4, 2, [TP, "sequence_parallel=true", "sharding=stage1"]),
    "TP 2, sharding stage 2": (4, 2, [TP, "sharding=stage2"]),
    "PP 2, TP 2, sequence parallelism": (4, 1, [PP, TP, "sequence_parallel=true"]),
}


def write_recipe(folder, arguments):
    """The recipe of all layouts, with its model and data, in a folder. Returns its path."""
    model = configs.read(arguments.model)
    sequence = min(TOKENS, model["max_position_embeddings"])
    formers.write_tokenizer(folder / "tokenizer")
    hosts.write_model(folder / "model", arguments.model, folder / "tokenizer")
    count = BATCH * (arguments.steps + 1) * sequence + 1
    tokens = np.random.default_rng(0).integers(0, model["vocab_size"], count, dtype=np.int32)
    formers.write_document(folder / "random", tokens)
    lines = formers.RECIPE | formers.precision_lines(arguments.backend, arguments.precision)
    lines |= {
        "amp_master_grad": True,
        "model_name_or_path": str(folder / "model"),
        "input_dir": f"1.0 {folder / 'random'}",
        "split": "1,0,0",
        "max_seq_len": sequence,
        "max_steps": arguments.steps,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
    }
    path = folder / "recipe.json"
    path.write_text(json.dumps(lines, indent=1))
    return path


def losses(name, recipe, arguments):
    """Of each step in a layout. Raises RuntimeError with the end of the log where the run failed."""
    processes, data, lines = LAYOUTS[name]
    folder = arguments.folder / name.replace(" ", "-").replace(",", "")
    folder.mkdir()
    main = ROOT / "paddle_te/hosts/paddleformers/__main__.py"
    launch = ["-m", "paddle.distributed.launch", "--nproc_per_node", str(processes), "--log_dir", str(folder / "logs")]
    batch = [f"per_device_train_batch_size={1 if PP in lines else BATCH // data}"]
    batch += [f"gradient_accumulation_steps={BATCH if PP in lines else 1}"]
    words = [arguments.python, *launch, main, "train", recipe, *batch, *lines, f"output_dir={folder / 'output'}"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run([*map(str, words)], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    log = folder / "logs/workerlog.0"
    found = [record["loss"] for record in formers.logged(log)] if log.exists() else []
    if done.returncode or len(found) != arguments.steps:
        end = log.read_text(errors="replace")[-2000:] if log.exists() else done.stderr[-2000:]
        raise RuntimeError(f"{name} failed: {end}")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpus", type=int, default=2, help="layouts of more are left out; default 2")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--precision", choices=("bf16", "fp8"), default="fp8")
    parser.add_argument("--backend", choices=("pd", "te"), default="te")
    parser.add_argument("--model", default="llama-125m", help="a configuration that comes with paddle_te")
    parser.add_argument("--tolerance", type=float, default=0.005, help="of mean losses, as a part; default 0.005")
    arguments = parser.parse_args()
    arguments.folder = arguments.folder.absolute()
    arguments.folder.mkdir(parents=True)
    recipe, alone, failed = write_recipe(arguments.folder, arguments), None, False
    for name, (processes, *_) in LAYOUTS.items():
        if processes > arguments.gpus:
            continue
        try:
            found = losses(name, recipe, arguments)
        except RuntimeError as error:
            print(error, flush=True)
            failed = True
            continue
        alone = alone or found
        part = abs(np.mean(found) / np.mean(alone) - 1)
        failed |= bool(part > arguments.tolerance)
        print(f"{name}: mean differs by {part:.2%}: {' '.join(f'{loss:.4f}' for loss in found)}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
