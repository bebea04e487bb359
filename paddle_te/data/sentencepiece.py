"""A sentencepiece model as an object of the library `tokenizers`, as transformers' LlamaConverter makes it."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram

SPACE = "▁"
PADDLENLP_FILE = "sentencepiece.bpe.model"
UNIGRAM, BYTE_PAIRS = 1, 2  # sentencepiece_model.proto: TrainerSpec.ModelType
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # and SentencePiece.Type
_NO_TEXT = (UNKNOWN, CONTROL)


# What is read of sentencepiece_model.proto: {message: {field: (number, type)}}. The module that comes with the package
# sentencepiece demands a newer protobuf than PaddleNLP allows.
_FIELDS = {
    "Piece": {"piece": (1, "string"), "score": (2, "float"), "type": (3, "int32")},
    "Trainer": {"model_type": (3, "int32"), "byte_fallback": (35, "bool"), "unk_piece": (45, "string")},
    "Normalizer": {
        "precompiled_charsmap": (2, "bytes"),
        "add_dummy_prefix": (3, "bool"),
        "remove_extra_whitespaces": (4, "bool"),
    },
    "Model": {"pieces": (1, "Piece"), "trainer_spec": (2, "Trainer"), "normalizer_spec": (3, "Normalizer")},
}
_DEFAULTS = {"model_type": "1", "unk_piece": "<unk>", "type": "1"}
_DEFAULTS |= dict.fromkeys(("add_dummy_prefix", "remove_extra_whitespaces"), "true")


@cache
def _proto() -> Any:
    """The class of a message Model."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="sentencepiece.proto", package="paddle_te", syntax="proto2")
    kinds = descriptor_pb2.FieldDescriptorProto
    for message, fields in _FIELDS.items():
        made = file.message_type.add(name=message)
        for name, (number, kind) in fields.items():
            label = kinds.LABEL_REPEATED if name == "pieces" else kinds.LABEL_OPTIONAL
            field = made.field.add(name=name, number=number, label=label)
            if kind in _FIELDS:
                field.type, field.type_name = kinds.TYPE_MESSAGE, f".paddle_te.{kind}"
            else:
                field.type = getattr(kinds, f"TYPE_{kind.upper()}")
            if name in _DEFAULTS:
                field.default_value = _DEFAULTS[name]
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("paddle_te.Model"))


def parse(content: bytes) -> Any:
    """The ModelProto of a .model file. Raises ValueError for another file, or one with other models than Llama's."""
    from google.protobuf.message import DecodeError

    try:
        model = _proto().FromString(content)
    except DecodeError as error:
        raise ValueError("is no sentencepiece model, or damaged") from error
    if len({piece.piece for piece in model.pieces}) < max(len(model.pieces), 4):
        raise ValueError("is no sentencepiece model, or damaged: it lacks pieces, or has some twice")
    if model.trainer_spec.model_type not in (UNIGRAM, BYTE_PAIRS):
        raise ValueError("is a sentencepiece model of words or characters, which no tokenizer here has")
    return model


def is_plain(model: Any) -> bool:
    """Whether sentencepiece itself gives the same tokens: byte pairs, bytes for what is unknown, text as it is."""
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    plain = not normalizer.precompiled_charsmap and not normalizer.remove_extra_whitespaces
    return plain and normalizer.add_dummy_prefix and trainer.byte_fallback and trainer.model_type == BYTE_PAIRS


def convert(model: Any, begin: list[str], legacy: bool, prefix_space: bool) -> Tokenizer:
    """Return the Tokenizer of a ModelProto.

    begin: what the first tokens are called, if not as in the model.
    legacy: a space is put before each text between added tokens, as until transformers 4.33, instead of before the
    whole text; prefix_space: whether one is.
    """
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    pieces[: len(begin)] = [(name, 0.0) for name in begin]
    tokenizer = Tokenizer(_model(model, pieces))
    added = [piece for piece in model.pieces if piece.type in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(each.piece, normalized=False, special=each.type == CONTROL) for each in added])
    if legacy:
        prepend = [normalizers.Prepend(prepend=SPACE)] if prefix_space else []
        tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(pattern=" ", content=SPACE)])
    else:
        scheme = "first" if prefix_space else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(content=" ", left=1)] if prefix_space else []
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _model(model: Any, pieces: list[tuple[str, float]]) -> BPE | Unigram:
    if model.trainer_spec.model_type == UNIGRAM:
        return Unigram(pieces, unk_id=0, byte_fallback=True)
    vocabulary = {piece: number for number, (piece, _) in enumerate(pieces)}
    own = {piece.piece: number for number, piece in enumerate(model.pieces)}
    unknown = model.trainer_spec.unk_piece
    # A text's "</s>" makes no control token in sentencepiece. transformers lets it, where "</" and "s>" are pieces.
    texts = {
        name: score for (name, score), piece in zip(pieces, model.pieces, strict=True) if piece.type not in _NO_TEXT
    }
    return BPE(vocabulary, _merges(own, texts), unk_token=unknown, fuse_unk=True, byte_fallback=True)


def _merges(vocabulary: dict[str, int], scores: dict[str, float]) -> list[tuple[str, str]]:
    """Pairs of pieces that make a piece, the best piece first: sentencepiece always merges the pair of the best one."""
    found = []
    for piece, score in scores.items():
        splits = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        pairs = [pair for pair in splits if pair[0] in vocabulary and pair[1] in vocabulary]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found += [(score, *pair) for pair in pairs]
    found.sort(key=lambda each: (each[0], len(each[1]), len(each[2])), reverse=True)
    return [(left, right) for _, left, right in found]
