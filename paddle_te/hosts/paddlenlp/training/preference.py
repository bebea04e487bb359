"""Tuning on preferences: what it has of its own beside fine-tuning, whose steps it goes through."""

import copy
from pathlib import Path
from typing import Any, ClassVar

from paddle_te.data.chat_template import ChatTemplate
from paddle_te.data.records import DEV, TRAIN
from paddle_te.data.tokenizer import AnyTokenizer
from paddle_te.host import HostArguments, HostConfig, HostModel
from paddle_te.hosts.paddlenlp import answers
from paddle_te.hosts.paddlenlp.families import model_class
from paddle_te.hosts.paddlenlp.loading import from_pretrained
from paddle_te.hosts.paddlenlp.training.arguments import data_seed
from paddle_te.hosts.paddlenlp.training.datasets import Datasets
from paddle_te.hosts.paddlenlp.training.finetune import Finetuning
from paddle_te.hosts.paddlenlp.training.finetune_trainer import FinetuneModelArguments, FinetuningTrainer
from paddle_te.hosts.paddlenlp.training.packing import needs_mask
from paddle_te.hosts.paddlenlp.training.preference_datasets import (
    PreferenceCollator,
    PreferenceDataArguments,
    create_datasets,
    data_identity,
    tokens_per_row,
)
from paddle_te.hosts.paddlenlp.training.preference_pipeline import in_pipeline
from paddle_te.hosts.paddlenlp.training.preference_reference import (
    Computed,
    NoReference,
    OwnWeights,
    Reference,
    SecondModel,
    precompute,
)
from paddle_te.hosts.paddlenlp.training.preference_trainer import (
    DPOArguments,
    DPOConfig,
    KTOArguments,
    KTOConfig,
    PreferenceTrainer,
    place_in_sequences,
)
from paddle_te.job import Job
from paddle_te.runs.identity import fingerprint
from paddle_te.weights.contents import read_state


class PreferenceTuning(Finetuning):
    """Hold what tuning on preferences has of its own. KTO: whether answers have labels instead of standing in pairs."""

    KTO: ClassVar[bool] = False
    CLASSES: ClassVar[tuple[type, ...]] = FinetuneModelArguments, PreferenceDataArguments, DPOArguments, DPOConfig

    def __init__(
        self,
        model_args: FinetuneModelArguments,
        data_args: PreferenceDataArguments,
        training_args: HostArguments,
        preference: DPOConfig | KTOConfig,
    ) -> None:
        super().__init__(model_args, data_args, training_args)
        self.preference = preference
        said = vars(training_args) | vars(data_args) | vars(model_args) | vars(preference)
        self.job = Job.of(said, script=training_args.SCRIPT)
        self.template: ChatTemplate | None = None
        self.config: HostConfig = None

    def datasets(self, tokenizer: AnyTokenizer, template: ChatTemplate | None) -> Datasets:
        self.template = template
        return create_datasets(self.data_args, tokenizer, template, self.training_args, self.KTO)

    def data_identity(self, template: ChatTemplate | None) -> dict[str, object]:
        return data_identity(self.data_args, template, data_seed(self.training_args))

    def tokens(self, dataset: Any) -> float:
        return tokens_per_row(dataset)

    def check_start(self, checkpoint: str) -> None:
        """Raise ValueError for a checkpoint between two updates of the reference: it does not hold the reference."""
        steps, step = self._update_steps, read_state(checkpoint).global_step
        if steps and step % steps:
            raise ValueError(
                f"{checkpoint} is of step {step}, and the reference was renewed every {steps} steps "
                "(--ref_model_update_steps): go on from a checkpoint of such a step"
            )

    @property
    def _update_steps(self) -> int:
        return max(self.job.ref_model_update_steps, 0)

    def make_config(self, datasets: Datasets) -> HostConfig:
        self.config = super().make_config(datasets)
        answers.configure(self.config)
        return self.config

    def make_model(self, config: HostConfig) -> HostModel:
        model = super().make_model(config)
        answers.give_log_probabilities(model)
        return model

    def make_trainer(self, model: HostModel, tokenizer: AnyTokenizer, datasets: Datasets) -> FinetuningTrainer:
        train, dev = datasets
        return PreferenceTrainer(
            model=model,
            args=self.training_args,
            data_collator=PreferenceCollator(
                self.data_args.max_seq_len,
                needs_mask(self.training_args),
                self.training_args.pipeline_parallel_degree > 1,
                *place_in_sequences(self.training_args),
            ),
            train_dataset=train,
            eval_dataset=dev,
            tokenizer=tokenizer,
            loss=self.preference.loss(),
            reference=self._reference(model),
            update_steps=self._update_steps,
        )

    def _reference(self, model: HostModel) -> Reference:
        if not self.job.has_reference:
            return NoReference()
        return SecondModel(self._second_model()) if self.job.second_model else OwnWeights(model)

    def _second_model(self) -> HostModel:
        args, config = self.training_args, copy.deepcopy(self.config)
        model = from_pretrained(
            model_class(config, args.pipeline_parallel_degree > 1),
            self.model_args.model_name_or_path,
            config,
            args.model_dtype,
            verify=args.verify_checkpoint,
        )
        answers.give_log_probabilities(model)
        return in_pipeline(model)

    def prepare(self, trainer: Any, datasets: Datasets) -> None:
        """Compute the reference's log-probabilities, where they are wanted beforehand, of the untrained model."""
        if self.job.precompute_ref_log_probs:
            splits = dict(zip((TRAIN, DEV), datasets, strict=True))
            precompute(trainer, trainer.reference, splits, self._reference_identity)
            trainer.reference = Computed()

    def _reference_identity(self, split: str) -> dict[str, Any]:
        args = self.training_args
        said = data_identity(self.data_args, self.template, None, split)
        model = Path(self.model_args.model_name_or_path)
        weights = fingerprint(sorted(model.glob("*.safetensors")) + sorted(model.glob("*.pdparams")))
        precision = f"{args.model_dtype}{', fp8' * args.use_fp8}"
        return said | {"model": weights, "backend": args.transformer_engine_backend, "precision": precision}

    def forwards(self) -> int:
        return int(self.job.has_reference and not self.job.precompute_ref_log_probs)


class KTOTuning(PreferenceTuning):
    """Hold what tuning on answers with labels has of its own."""

    KTO = True
    CLASSES = FinetuneModelArguments, PreferenceDataArguments, KTOArguments, KTOConfig
