"""Run a recipe of PaddleFormers with our decoder layers, one of several processes: docs/guides/paddleformers.md.

    python -m paddle_te.hosts.paddleformers train run.yaml [name=value ...]     trains
    python -m paddle_te.hosts.paddleformers export run.yaml [name=value ...]    merges the LoRA adapter in output_dir

The recipe is what paddleformers-cli takes, and may also say which decoder layers the model has, such as

    transformer_engine_backend: transformer_engine
    use_fp8: true
    fp8_recipe: current
"""

import os
import sys
from contextlib import ExitStack
from pathlib import Path

from paddle_te.data.corpus import CorpusError
from paddle_te.runs import screen
from paddle_te.runs.heartbeat import has_launcher
from paddle_te.runs.leaving import leaving_at_once
from paddle_te.runs.rollback import RunEnded


def main() -> int:
    """Run the command line. Return 2 for a wrong one or a wrong recipe; show whole what is raised later.

    Where a launcher watches, the screen has our lines, and a file of details PaddleFormers'.
    """
    if has_launcher():
        screen.before_imports()
    with ExitStack() as shown:
        return _run(shown)


def _run(shown: ExitStack) -> int:
    if len(sys.argv) < 3 or sys.argv[1] not in ("train", "export") or not Path(sys.argv[2]).is_file():
        print(__doc__, file=sys.stderr)
        return 2
    from paddle_te.hosts.paddleformers.recipes import check_recipe, check_training, read_recipe, train  # 20 seconds
    from paddle_te.hosts.paddleformers.weights import check_adapter, check_weights

    trains = sys.argv[1] == "train"
    if has_launcher():
        shown.enter_context(screen.shown())
    try:
        recipe = read_recipe()
        (check_training if trains else check_recipe)(recipe)
        check_weights(recipe["model_name_or_path"])
        if recipe.get("lora_path"):
            check_adapter(recipe["lora_path"])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if trains:
        if has_launcher():
            screen.keep_details(recipe["output_dir"], int(os.environ.get("PADDLE_TRAINER_ID", "0")), "PaddleFormers")
        try:
            train(recipe)
        except CorpusError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except RunEnded as error:
            print(f"error: {error}", file=sys.stderr)
            return error.status
    else:
        from paddle_te.hosts.paddleformers.export import export

        export(recipe)
    return 0


if __name__ == "__main__":
    with leaving_at_once():
        sys.exit(main())
