"""The loss of a step is the mean over all its labels that count: weights, and what a Trainer makes of them."""

import contextlib
from types import SimpleNamespace

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddlenlp.trainer import PdArgumentParser, TrainerCallback

from paddle_te.data.course import shuffled
from paddle_te.hosts.paddlenlp.families import model_class
from paddle_te.hosts.paddlenlp.lora import lora_config, lora_model_class
from paddle_te.hosts.paddlenlp.modeling import causal_mask_only, count_labels
from paddle_te.hosts.paddlenlp.training.finetune_datasets import Collator, FinetuneDataArguments
from paddle_te.hosts.paddlenlp.training.finetune_trainer import FinetuningArguments, FinetuningTrainer, check_whole_step
from paddle_te.options.lora import Adapter
from paddle_te.training.loss_weights import (
    COUNTS,
    WEIGHT,
    CountingCollator,
    Evaluated,
    PipelineLoss,
    micro_counts,
    weighed,
)
from tests.pretraining import words
from tests.te_weights import relative
from tests.unit.hosts.paddlenlp.native import draw_adapters, tiny_config

# --------------------------------------------------------------------------------------------- weights


def counted(*counts):
    return [{"number": number, COUNTS: list(rows)} for number, rows in enumerate(counts)]


def test_a_micro_batch_weighs_as_much_as_its_labels():
    got = list(weighed(iter(counted([3, 2], [0, 1], [5, 5], [4, 4])), 2))
    assert [batch["number"] for batch in got] == [0, 1, 2, 3] and not any(COUNTS in batch for batch in got)
    assert [batch[WEIGHT] for batch in got] == [5 / 3, 1 / 3, 10 / 9, 8 / 9]


def test_nothing_changes_where_all_have_as_many():
    for count in range(1, 200):
        assert [batch[WEIGHT] for batch in weighed(iter(counted(*[[count]] * 7)), 7)] == [1.0] * 7


def test_no_label_counts():
    assert [batch[WEIGHT] for batch in weighed(iter(counted([0], [0])), 2)] == [0, 0]


def test_each_kind_of_labels_has_weights_of_its_own():
    got = [batch[WEIGHT] for batch in weighed(iter(counted([[1, 5], [2, 1]], [[1, 18]])), 2)]
    assert got == [(3 * 2 / 4, 6 * 2 / 24), (1 * 2 / 4, 18 * 2 / 24)]


def test_over_ranks(monkeypatch):
    """Four processes, of which two and two read the same: 6 and 18 labels."""
    sums = []

    def all_reduce(tensor):
        sums.append(tensor.item())
        tensor.add_(paddle.to_tensor(48.0 - tensor.item()))

    monkeypatch.setattr(paddle.distributed, "all_reduce", all_reduce)
    got = [batch[WEIGHT].item() for batch in weighed(iter(counted([1], [5])), 2, ranks=2, processes=4)]
    assert sums == [6] and got == pytest.approx([1 * 2 * 2 / 24, 5 * 2 * 2 / 24])


def test_one_step_is_read_ahead():
    read = []

    def batches():
        for number in range(7):
            read.append(number)
            yield {COUNTS: [1]}

    ahead = []
    for _ in weighed(batches(), 3):
        ahead.append(len(read))
    assert ahead == [4, 5, 6, 7, 7, 7, 7]


def test_a_pipelines_micro_batches_get_theirs_in_a_row():
    loss = PipelineLoss(lambda scores, labels: scores + labels)
    loss.begin([9.0])
    loss.begin([2.0])
    loss.add(3.0)
    assert [loss(1, 2) for _ in range(3)] == [6, 9, 3]
    assert micro_counts([1, 2, 0, 0, 3, 6], 3) == [3, 0, 9]


def test_an_evaluation_is_a_mean_over_labels():
    evaluated = Evaluated()
    assert evaluated.mean(1) == 0
    for loss, count in ((2.0, 3), (0.0, 0), (5.0, 1)):
        evaluated.add(paddle.to_tensor(loss), count)
    assert evaluated.mean(1) == 11 / 4


def test_collator():
    collate = CountingCollator(lambda samples: {"labels": np.array(samples)}, ignore_index=7)
    assert collate([[7, 1, 2], [7, 7, 7]])[COUNTS] == [2, 0]


@pytest.mark.parametrize("drop_last, samples, fits", [(True, 12, True), (True, 11, False), (False, 1, True)])
def test_a_run_has_a_step(drop_last, samples, fits):
    sizes = dict(per_device_train_batch_size=2, gradient_accumulation_steps=3, dataset_world_size=2)
    refused = contextlib.nullcontext() if fits else pytest.raises(ValueError, match="12 samples .2 × 3 × 2.* are 11;")
    with refused:
        check_whole_step(samples, SimpleNamespace(dataloader_drop_last=drop_last, **sizes))


# --------------------------------------------------------------------------------------------- what a Trainer trains

LENGTHS = [(9, 3), (4, 2), (5, 2), (2, 20), (3, 1), (6, 5), (7, 11)]  # of questions and answers


def draw_samples(seed, vocabulary=96):
    generator = np.random.default_rng(seed)
    samples = []
    for question, answer in LENGTHS:
        tokens = generator.integers(1, vocabulary, question + answer + 1)
        labels = np.where(np.arange(question + answer) < question, -100, tokens[1:])
        samples.append({"input_ids": tokens[:-1].tolist(), "labels": labels.tolist()})
    return samples


class Drawn(paddle.io.Dataset):
    """What `draw_samples` gives, as `finetune_datasets.Samples` gives its items."""

    def __init__(self, samples):
        super().__init__()
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return {name: np.array(value, "int32") for name, value in self.samples[index].items()}


def reference(model, samples):
    """(loss, gradients) as the sum over the samples, one by one, divided by the number of labels."""
    total, count = 0, 0
    with causal_mask_only():
        for sample in samples:
            logits = model(paddle.to_tensor([sample["input_ids"]]))
            logits = (logits[0] if isinstance(logits, tuple) else logits)[0].astype("float64")
            labels = paddle.to_tensor(sample["labels"])
            total += F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
            count += int((labels != -100).sum())
    loss = total / count
    trained = [p for p in model.parameters() if not p.stop_gradient]
    return loss.item(), paddle.grad(loss, trained)


class Compared(TrainerCallback):
    """Compares the gradients of each step, just before its update, with those of `reference`."""

    def __init__(self, samples, size):
        self.samples, self.size, self.losses, self.wanted = samples, size, [], []

    def order(self):
        """The samples of all steps of two epochs."""
        for epoch in range(2):
            order = shuffled(len(self.samples), 42)(epoch).tolist()  # --seed's default
            yield from (order[start : start + self.size] for start in range(0, len(order), self.size))

    def on_optimizer_begin(self, args, state, control, model=None, **kwargs):
        numbers = list(self.order())[state.global_step]
        loss, gradients = reference(model, [self.samples[number] for number in numbers])
        self.wanted.append(loss)
        for parameter, gradient in zip((p for p in model.parameters() if not p.stop_gradient), gradients, strict=True):
            assert relative(parameter.grad, gradient) < 1e-4, (state.global_step, parameter.name)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])


def trainer(tmp_path, backend, samples, model_flags=None, lora=False, **flags):
    flags = (
        dict(
            output_dir=tmp_path,
            do_train="true",
            num_train_epochs=2,
            learning_rate=1e-3,
            max_grad_norm=0,
            logging_steps=1,
            disable_tqdm="true",
            report_to="none",
            device="cpu",
            save_strategy="no",
            transformer_engine_backend=backend,
        )
        | flags
    )
    args, data_args = PdArgumentParser((FinetuningArguments, FinetuneDataArguments)).parse_args_into_dataclasses(
        words(flags | dict(src_length=16, max_length=32))
    )
    config = tiny_config(transformer_engine_backend=backend, use_cache=False, **model_flags or {})
    model = model_class(config)(config)
    if lora:
        model = lora_model_class(backend)(model, lora_config(Adapter(rank=4)))
        draw_adapters(model)
    datasets = dict(train_dataset=Drawn(samples), eval_dataset=Drawn(samples))
    return FinetuningTrainer(model=model, args=args, data_collator=Collator(data_args), **datasets)


CHUNKS = dict(use_fused_linear_cross_entropy=True)


@pytest.mark.parametrize(
    "backend, batch, micro_batches, others",
    [
        ("paddle", 1, 4, {}),
        ("paddle", 2, 2, dict(model_flags=CHUNKS)),
        ("paddle", 3, 4, dict(lora=True)),  # more than there are
        ("none", 1, 3, {}),
        ("none", 2, 2, dict(lora=True)),
    ],
)
def test_gradients_and_loss_are_means_over_labels(seed, tmp_path, backend, batch, micro_batches, others):
    samples = draw_samples(seed)
    sizes = dict(per_device_train_batch_size=batch, gradient_accumulation_steps=micro_batches)
    training = trainer(tmp_path, backend, samples, **sizes, **others)
    compared = Compared(samples, batch * micro_batches)
    training.add_callback(compared)
    with causal_mask_only():
        training.train()
    assert len(compared.losses) == 2 * -(-len(samples) // compared.size)
    assert compared.losses == pytest.approx(compared.wanted, rel=1e-5)


@pytest.mark.parametrize("backend", ["none", "paddle"])
def test_evaluation_does_not_depend_on_the_batch(seed, tmp_path, backend):
    samples, found = draw_samples(seed), []
    for batch in (1, 2, 3, 8):
        paddle.seed(seed)
        training = trainer(tmp_path, backend, samples, do_eval="true", per_device_eval_batch_size=batch)
        with causal_mask_only():
            found.append(training.evaluate()["eval_loss"])
    training.model.eval()
    assert found == pytest.approx([reference(training.model, samples)[0]] * 4, rel=1e-6)


def test_evaluations_speed_is_of_the_samples_there_are(seed, tmp_path):
    flags = dict(do_eval="true", per_device_eval_batch_size=2, max_evaluate_steps=100)
    training = trainer(tmp_path, "paddle", draw_samples(seed), **flags)
    with causal_mask_only():
        metrics = training.evaluate()
    samples = metrics["eval_samples_per_second"] * metrics["eval_runtime"]
    assert len(LENGTHS) - 0.5 < samples < len(LENGTHS) + 1.5  # a filler may be among them


@pytest.mark.parametrize("backend, fused", [("none", False), ("paddle", False), ("paddle", True)])
def test_evaluation_counts_the_labels_that_are_found(seed, tmp_path, backend, fused):
    samples = draw_samples(seed)
    paddle.seed(seed)
    flags = dict(model_flags=dict(use_fused_linear_cross_entropy=fused), do_eval="true", per_device_eval_batch_size=2)
    training = trainer(tmp_path, backend, samples, **flags)
    training.model.eval()
    right = count = 0
    with causal_mask_only():
        for number, sample in enumerate(samples):
            logits = training.model(paddle.to_tensor([sample["input_ids"]]))
            likeliest = (logits[0] if isinstance(logits, tuple) else logits)[0].numpy().argmax(-1)
            labels = np.array(sample["labels"])
            kept = labels != -100
            labels[kept] = np.where(np.arange(kept.sum()) % 3 == number % 2, likeliest[kept], labels[kept])
            sample["labels"] = labels.tolist()
            right, count = right + (labels == likeliest)[kept].sum(), count + kept.sum()
        metrics = training.evaluate()
    assert 0 < right < count and metrics["eval_accuracy"] == right / count
    assert training.model.criterion.accuracy is None


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gpt"])
def test_paddlenlps_own_models_divide_by_labels(seed, tmp_path, family):
    """Where no label counts, and where a token is certain."""
    model = model_class(config := tiny_config(family, transformer_engine_backend="none"))(config)
    count_labels(model)
    scores = paddle.zeros([1, 3, config.vocab_size])
    scores[0, 0, 5] = 1000.0
    labels = paddle.to_tensor([[5, 6, -100]])
    assert model.criterion(scores, labels).item() == pytest.approx(np.log(config.vocab_size) / 2)
    assert model.criterion(scores, paddle.full_like(labels, -100)).item() == 0
