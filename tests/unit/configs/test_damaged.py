"""config.json damaged at random places: it is read, or refused in one line, and nothing else."""

import json
import random

from paddle_te.configs.others import CHANGING, WITHOUT_MEANING
from paddle_te.configs.reading import check_computed
from paddle_te.configs.schema import SCHEMAS, keys_of, words_of
from paddle_te.hosts.paddlenlp.loading import read_config
from paddle_te.planner.model import check_size
from paddle_te.weights.config import read_config as opened
from tests.unit.configs.test_reading import gpt2, sized
from tests.unit.configs.written import REAL, TRANSFORMERS

WHOLE = [*map(sized, SCHEMAS), gpt2(), *REAL.values(), *TRANSFORMERS.values()]
KEYS = dict.fromkeys(name for record in SCHEMAS.values() for name in keys_of(record))
NAMES = [*KEYS, *CHANGING, *WITHOUT_MEANING]  # in one order in every process, so that a seed tells what was damaged
VALUES = [None, True, False, -1, 0, 1, 3, 64, 10**12, 10**39, -0.5, 1.0, 1e300, "", "silu", [], [[1]], {}, {"a": 1}]
VALUES += [{"type": "linear", "factor": 2.0}, {"rope_type": "yarn"}, {"rope_type": "dynamic", "factor": 3}]


def damaged(rng):
    """The bytes of a right file with other values, other keys, or other bytes."""
    config = dict(rng.choice(WHOLE))
    for _ in range(rng.choice([0, 1, 1, 2])):
        name = rng.choice(NAMES if rng.random() < 0.5 else list(config))
        config[name[: -1 if rng.random() < 0.1 else None]] = rng.choice(VALUES)
    data = bytearray(json.dumps(config).encode())
    for _ in range(rng.choice([0, 0, 1, 3])):
        place = rng.randrange(len(data))
        data[place : place + rng.choice([0, 1, 20])] = rng.randbytes(rng.choice([0, 1, 2]))
    return bytes(data)


def test_random_damage(tmp_path, seed):
    rng, read = random.Random(seed), 0
    for _ in range(400):
        (tmp_path / "config.json").write_bytes(damaged(rng))
        try:
            config = read_config(tmp_path, "paddle")
            check_size(config, str(tmp_path / "config.json"))
            read += 1
        except ValueError as error:
            assert str(error).startswith(str(tmp_path / "config.json")) and "\n" not in str(error)
            assert len(str(error)) < len(str(tmp_path)) + 400
            continue
        said = opened(tmp_path)
        check_computed(said, "paddle")
        for name, key in keys_of(type(said.record)).items():  # what was read is what the file says
            is_read = name in said.content and name in words_of(name, key, said.theirs)
            if is_read and name not in ("rope_scaling", "rope_parameters"):
                assert getattr(said.record, name) == said.content[name]
    assert 20 < read < 380
