"""TRL's DPOTrainer with LoRA, from random weights: what preferences.TrlRun starts, in an environment with PyTorch.

    python trl_training.py '{"model": FOLDER, "pairs": FILE, "output": FOLDER, "batch": 2, …}'

Imports nothing of this project. Writes OUTPUT/train_log.jsonl: {"step", "step_time", "loss", "peak_memory_bytes",
"tokens_per_second"} of each step.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer

GPU = torch.cuda.is_available()


class Log(TrainerCallback):
    """Write a line for each step; the device is waited for at its beginning and end."""

    def __init__(self, path: Path) -> None:
        self.path, self.tokens, self.begun, self.line = path, 0, 0.0, dict[str, Any]()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._wait()
        self.tokens, self.begun = 0, time.perf_counter()

    def on_step_end(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
        self._wait()
        seconds = time.perf_counter() - self.begun
        peak = torch.cuda.max_memory_reserved() if GPU else 0
        self.line = {"step": state.global_step, "step_time": seconds, "peak_memory_bytes": peak}
        self.line["tokens_per_second"] = self.tokens / seconds

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs:
            with self.path.open("a") as file:
                file.write(json.dumps(self.line | {"loss": float(logs["loss"])}) + "\n")

    @staticmethod
    def _wait() -> None:
        if GPU:
            torch.cuda.synchronize()


class CountingTrainer(DPOTrainer):
    """Count the tokens of both answers and their questions, without padding."""

    log_: Log

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.log_.tokens += int(inputs["attention_mask"].sum())
        return super().training_step(model, inputs, *args, **kwargs)


def configuration(said: dict[str, Any]) -> DPOConfig:
    """Return TRL's settings; where they are not named here, its defaults."""
    return DPOConfig(
        output_dir=said["output"],
        per_device_train_batch_size=said["batch"],
        gradient_accumulation_steps=said["micro_batches"],
        max_steps=said["steps"],
        gradient_checkpointing=said["checkpointing"],
        max_length=None,
        learning_rate=1e-5,
        bf16=GPU,
        use_cpu=not GPU,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=0,
    )


def main() -> None:
    """Train, and say in the log what it took."""
    said = json.loads(sys.argv[1])
    output = Path(said["output"])
    output.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.from_pretrained(said["model"])
    with torch.device("cuda" if GPU else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{said['model']}/tokenizer.json", **names)
    trainer = CountingTrainer(
        model=model,
        args=configuration(said),
        train_dataset=load_dataset("json", data_files=said["pairs"], split="train"),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=said["lora_rank"], lora_alpha=2 * said["lora_rank"], target_modules="all-linear"),
    )
    trainer.log_ = Log(output / "train_log.jsonl")
    trainer.add_callback(trainer.log_)
    trainer.train()


if __name__ == "__main__":
    main()
