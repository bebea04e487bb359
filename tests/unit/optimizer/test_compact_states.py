"""paddle_te.optimizer.compact_states: its rounding, its two halves of a master weight, and AdamW's steps with them."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import paddle
import pytest

from paddle_te.optimizer import Step, compact_states
from paddle_te.optimizer.compact_states import join_master, keep_compact, noise, noise_key, split_master
from paddle_te.options.training import MASTER_WEIGHTS, MOMENTS
from paddle_te.weights import blocks

COMPACT = dict(moments="bfloat16", master_weights="bf16_remainder")
SMALLEST = dict(moments="int8", master_weights="bf16_remainder")
SHAPES = [(33, 65), (257,), (1,)]
SETTINGS = dict(beta1=0.9, beta2=0.95, epsilon=1e-8, rate_ratio=1.0, decay=0.1)


@pytest.fixture
def generator(seed):
    return np.random.default_rng(seed)


def any_bits(generator, count):
    """float32 of all magnitudes, both signs, among them infinities, subnormal numbers and halves between bfloat16s."""
    bits = generator.integers(0, 2**32, count, dtype="uint32")
    bits[: count // 4] = bits[: count // 4] & 0xFFFF0000 | 0x8000
    bits[-6:] = 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF, 1, 0x80000000
    return bits.view("float32")


def wide(tensor):
    return tensor.astype("float32").numpy()


def bits_of(array):
    return np.ascontiguousarray(array, "float32").view("uint32")


def test_the_expected_value_of_a_rounded_number_is_the_number(generator):
    """The mean over all 65536 random numbers that there are, exactly."""
    random_bits = np.arange(2**16, dtype="int32")
    for number in generator.standard_normal(5).astype("float32") * np.float32([1e-30, 1e-3, 1, 1e3, 1e30]):
        values = paddle.full([2**16], float(number))
        rounded = wide(compact_states.round_stochastically(values, paddle.to_tensor(random_bits)))
        assert rounded.astype("float64").mean() == number
        assert len(np.unique(rounded)) <= 2


def test_what_bfloat16_has_is_not_rounded(generator):
    values = (bits_of(any_bits(generator, 1000)) & 0xFFFF0000).view("float32")
    random_bits = paddle.to_tensor(generator.integers(0, 2**16, values.size, dtype="int32"))
    got = wide(compact_states.round_stochastically(paddle.to_tensor(values), random_bits))
    np.testing.assert_array_equal(got, values)
    all_bits_set = paddle.to_tensor(np.uint32([0x7FFFFFFF, 0xFFFFFFFF]).view("float32"))
    got = compact_states.round_stochastically(all_bits_set, paddle.full([2], 0xFFFF, "int32"))
    assert np.isnan(wide(got)).all()


def test_weight_and_remainder_are_the_master_weight(generator):
    master = any_bits(generator, 100000)
    weight, remainder = split_master(paddle.to_tensor(master))
    assert (weight.dtype, remainder.dtype) == (paddle.bfloat16, paddle.int16)
    joined, numbers = join_master(weight, remainder).numpy(), ~np.isnan(master)
    assert (bits_of(joined)[numbers] == bits_of(master)[numbers]).all()
    assert np.isnan(joined[~numbers]).all() and np.isnan(wide(weight)[~numbers]).all()
    kept = bits_of(master)[numbers] & 0x7FFFFFFF
    down = kept & 0xFFFF0000
    nearest = np.where(kept - down < 0x8000, down, down + 0x10000)  # magnitudes; a tie away from zero
    assert (bits_of(wide(weight))[numbers] & 0x7FFFFFFF == nearest).all()


def lowbias32(x):
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


def test_random_numbers_follow_from_seed_step_and_element(generator):
    seed, step, first = (int(n) for n in generator.integers(0, 2**31, 3))
    key = noise_key(seed, step)
    assert key == lowbias32(lowbias32(seed) ^ step)
    ours = [wide(part).astype("int64") for part in noise(key, first, [3, 5])]
    whole = [lowbias32((first + i) % 2**32 ^ key) for i in range(15)]
    assert ours[0].ravel().tolist() == [bits % 2**16 for bits in whole]
    assert ours[1].ravel().tolist() == [bits // 2**16 for bits in whole]
    rest = noise(key, first + 7, [8])
    assert all((wide(part) == own.ravel()[7:]).all() for part, own in zip(rest, ours, strict=True))


CODES = {compact_states.SIGNED: np.arange(-127, 128), compact_states.UNSIGNED: np.arange(256)}


@pytest.mark.parametrize("greatest", CODES)
def test_the_expected_value_of_an_encoded_number_is_the_number(generator, greatest):
    """The mean over all 65536 random numbers that there are, within float32's precision and 1 / 65536 of a step."""
    exponent = generator.integers(-27, 30)  # with smaller ones a unit, the greatest / 255**4, is 0
    numbers = np.abs(generator.standard_normal(256)).astype("float32") * np.float32(10.0**exponent)
    for place in generator.integers(0, 256, 4):
        values = np.zeros((256, 1, 256), "float32")
        values[:, 0] = np.where(np.arange(256) == numbers.argmax(), numbers, numbers[place])
        random_bits = np.arange(2**16, dtype="int32").reshape(256, 1, 256)
        codes, units = (
            t.numpy() for t in compact_states.encode(paddle.to_tensor(values), greatest, paddle.to_tensor(random_bits))
        )
        assert codes[:, 0, numbers.argmax()].max() == greatest
        rest = np.delete(codes[:, 0], numbers.argmax(), axis=1).astype("float64")
        assert rest.max() - rest.min() <= 1 and rest.max() <= greatest
        mean = (rest**4).mean() * float(units[0, 0, 0])
        assert abs(mean - numbers[place]) <= 0.01 * ((rest.max() + 1) ** 4 - rest.max() ** 4) * units[0, 0, 0]


def test_blocks_of_what_has_no_code(generator):
    """Zeros, and numbers too small for a unit, become 0; a block with a number that is not finite becomes NaN alone."""
    values = generator.random((6, 1, 256), "float32")
    values[0] = 0
    values[1] = 1e-39
    values[2, 0, 7], values[3, 0, 200] = np.nan, np.inf
    bits = paddle.to_tensor(generator.integers(0, 2**16, values.shape, dtype="int32"))
    codes, units = compact_states.encode(paddle.to_tensor(values), 127, bits)
    kept = compact_states.split_blocks(codes, units, [6, 256])
    got = compact_states.join_blocks(kept, [6, 256], signed=True).numpy()
    assert (got[:2] == 0).all() and np.isnan(got[2:4]).all() and np.isfinite(got[4:]).all()
    assert np.abs(got[4:] - values[4:, 0]).max() <= 1 - (126 / 127) ** 4


@pytest.mark.parametrize("shape", [(3, 700), (5, 2), (1,), (513,), (2, 3, 256)])
def test_bytes_of_blocks_are_units_and_codes(generator, shape):
    """As weights/blocks.py reads them from files: each row's blocks, and the numbers worked out by numpy."""
    width, rows = shape[-1], math.prod(shape[:-1])
    count = -(-width // 256)
    codes = generator.integers(-127, 128, (rows, count, 256)).astype("float32")
    codes[:, -1, width - 256 * (count - 1) :] = 0
    units = generator.random((rows, count, 1), "float32")
    kept = compact_states.split_blocks(paddle.to_tensor(codes), paddle.to_tensor(units), list(shape))
    assert kept.dtype == paddle.int8 and tuple(kept.shape) == blocks.moment_shape(shape)
    want = (units * (codes**2 * codes**2) * np.sign(codes)).reshape(rows, -1)[:, :width].reshape(shape)
    np.testing.assert_array_equal(compact_states.join_blocks(kept, list(shape), signed=True).numpy(), want)
    unsigned = codes.astype("int8").view("uint8").astype("float32")
    want = (units * (unsigned**2 * unsigned**2)).reshape(rows, -1)[:, :width].reshape(shape)
    np.testing.assert_array_equal(compact_states.join_blocks(kept, list(shape), signed=False).numpy(), want)
    elements = blocks.unpack(kept.numpy(), width)
    in_file = (elements >> 8).astype("uint32").view("float32"), (elements & 0xFF).astype("uint8").astype("float32")
    np.testing.assert_array_equal(in_file[0] * (in_file[1] ** 2 * in_file[1] ** 2), want)


def test_a_step_in_8_bits_is_adamw(generator, seed):
    """Moments one step of a code apart at most, and the weight's change with moments as they were kept before."""
    shape = (6, 700)
    master, grad, moment1 = (generator.standard_normal(shape).astype("float32") for _ in range(3))
    made = make_step((master, grad, moment1, moment1**2), False, seed, 0)
    for _ in range(2):
        moments = compact_states._moments_of(made)
        kept = [moment.numpy().astype("float64") for moment in moments]
        before = made.master.numpy().astype("float64")
        if made.moment1.dtype != paddle.int8:
            bits = noise(1, 0, shape)
            made = replace(
                made,
                **dict(
                    zip(
                        ("moment1", "moment2"),
                        compact_states._moments_in_blocks(moments[0], moments[1].sqrt(), bits),
                        strict=True,
                    )
                ),
            )
            continue
        compact_states.step_in_paddle(made)
        want = adamw(before, grad.astype("float64"), *kept, 0)
        assert np.abs(made.master.numpy() - want[0]).max() < 1e-6 * (np.abs(master).max() + 1)
        got = [moment.numpy() for moment in compact_states._moments_of(made)]
        for row, place in product(range(6), range(0, 700, 256)):
            block = row, slice(place, place + 256)
            for array, exact, greatest in ((got[0], want[1], 127), (np.sqrt(got[1]), np.sqrt(want[2]), 255)):
                largest = np.abs(exact[block]).max()
                code = (np.abs(exact[block]) / largest) ** 0.25 * greatest
                step = ((code + 1) ** 4 - code**4) * largest / greatest**4
                assert (np.abs(array[block] - exact[block]) <= 1.001 * step).all()
        assert (got[1] > 0).all()


def make_step(arrays, compact, seed, step):
    """A Step of arrays: a master weight, its gradient and two moments."""
    master, grad, moment1, moment2 = (paddle.to_tensor(array) for array in arrays)
    param, remainder = split_master(master)
    if compact:
        moment1, moment2 = (moment.astype("bfloat16") for moment in (moment1, moment2))
    powers = (paddle.full([1], SETTINGS[beta] ** (step + 1)) for beta in ("beta1", "beta2"))
    tensors = (param, grad, None, paddle.full([1], 1e-2), moment1, moment2, None, *powers)
    return Step(*tensors, remainder if compact else master, **SETTINGS, noise_key=noise_key(seed, step), noise_first=0)


def adamw(master, g, m1, m2, step):
    """One step in float64, as Loshchilov & Hutter have it, with epsilon beside the corrected second moment."""
    beta1, beta2, rate = SETTINGS["beta1"], SETTINGS["beta2"], 1e-2
    m1, m2 = beta1 * m1 + (1 - beta1) * g, beta2 * m2 + (1 - beta2) * g * g
    corrected1, corrected2 = m1 / (1 - beta1 ** (step + 1)), m2 / (1 - beta2 ** (step + 1))
    change = rate * corrected1 / (np.sqrt(corrected2) + SETTINGS["epsilon"])
    return master * (1 - rate * SETTINGS["decay"]) - change, m1, m2


@pytest.mark.parametrize("compact", [False, True])
def test_a_step_is_adamw(generator, seed, compact):
    for step in range(3):
        master, grad, moment1 = (generator.standard_normal((40, 7)).astype("float32") for _ in range(3))
        moment1 = wide(paddle.to_tensor(moment1 / 10).astype("bfloat16"))
        moment2 = wide(paddle.to_tensor(moment1**2).astype("bfloat16"))
        made = make_step((master, grad, moment1, moment2), compact, seed, step)
        compact_states.step_in_paddle(made)
        want = adamw(*(array.astype("float64") for array in (master, grad, moment1, moment2)), step)
        got = join_master(made.param, made.master) if compact else made.master
        # roundings of float32: three of the weight, and of its change, which is below 0.04, those below and a few more
        assert np.abs(wide(got) - want[0]).max() < 8 * 2**-24 * (np.abs(master).max() + 1)
        terms = adamw(0, np.abs(grad), np.abs(moment1), moment2, step)
        for moment, exact, sizes in zip((made.moment1, made.moment2), want[1:], terms[1:], strict=True):
            bound = 2**-18 * sizes  # of 1 - beta in float32 2**-20.6, and of sums and products
            bound += 2**-7 * np.abs(exact) * compact  # to one of the two neighbours in bfloat16
            assert (np.abs(wide(moment) - exact) <= bound).all()
        assert float(made.beta1_power) == pytest.approx(SETTINGS["beta1"] ** (step + 2), rel=1e-6)


def make(arrays, dtype, seed, **kept):
    paddle.utils.unique_name.switch()
    parameters = []
    for number, array in enumerate(arrays):
        parameter = paddle.base.framework.EagerParamBase.from_tensor(paddle.to_tensor(array).astype(dtype))
        parameter.stop_gradient, parameter.name = False, f"weight_{number}"
        parameters.append(parameter)
    optimizer = paddle.optimizer.AdamW(
        paddle.optimizer.lr.LinearWarmup(1e-2, 3, 0.0, 1e-2), parameters=parameters, multi_precision=True
    )
    keep_compact(optimizer, seed=seed, **kept)
    return parameters, optimizer


def train(parameters, optimizer, generator, steps):
    for _ in range(steps):
        grads = [generator.standard_normal(p.shape).astype("float32") for p in parameters]
        optimizer._apply_optimize(
            None, None, [(p, paddle.to_tensor(g)) for p, g in zip(parameters, grads, strict=True)]
        )
        optimizer._learning_rate.step()


def tensors_of(optimizer):
    state = optimizer.state_dict()
    masters = {f"master weight {name}": tensor for name, tensor in state.get("master_weights", {}).items()}
    return masters | {name: tensor for name, tensor in state.items() if isinstance(tensor, paddle.Tensor)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kept", [COMPACT, SMALLEST], ids=lambda kept: kept["moments"])
def test_training_goes_on_from_a_file_as_if_it_had_not_stopped(generator, seed, tmp_path, dtype, kept):
    arrays = [generator.standard_normal(shape).astype("float32") for shape in SHAPES]
    numbers, again = np.random.default_rng(seed), np.random.default_rng(seed)
    whole, whole_optimizer = make(arrays, dtype, seed, **kept)
    train(whole, whole_optimizer, numbers, 6)
    first, optimizer = make(arrays, dtype, seed, **kept)
    train(first, optimizer, again, 3)
    paddle.save(optimizer.state_dict(), str(tmp_path / "optimizer.pdopt"))
    second, optimizer = make([wide(p) for p in first], dtype, seed, **kept)
    optimizer.set_state_dict(paddle.load(str(tmp_path / "optimizer.pdopt")))
    train(second, optimizer, again, 3)
    assert all((wide(a) == wide(b)).all() for a, b in zip(whole, second, strict=True))
    want, got = tensors_of(whole_optimizer), tensors_of(optimizer)
    assert want.keys() == got.keys() and len(want) == len(SHAPES) * (5 if dtype == "bfloat16" else 4)
    assert all(got[name].dtype == want[name].dtype for name in want)
    assert all((wide(got[name]) == wide(want[name])).all() for name in want)
    _, other = make(arrays, dtype, seed + 1, **kept)
    train(other._parameter_list, other, np.random.default_rng(seed), 6)
    assert any((wide(tensor) != wide(want[name])).any() for name, tensor in tensors_of(other).items())


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("master_weights", MASTER_WEIGHTS)
def test_bytes_of_the_state(generator, moments, master_weights):
    arrays = [generator.standard_normal(shape).astype("float32") for shape in SHAPES]
    parameters, optimizer = make(arrays, "bfloat16", 0, moments=moments, master_weights=master_weights)
    if moments == master_weights == "float32":
        assert type(optimizer) is paddle.optimizer.AdamW  # which Paddle's CPU cannot run in bfloat16
        return
    train(parameters, optimizer, generator, 1)
    stored = sum(tensor.size * tensor.element_size() for tensor in tensors_of(optimizer).values())
    powers = 2 * 4 * len(SHAPES)
    in_moments = sum(MOMENTS[moments] * math.prod(shape) for shape in SHAPES)
    if moments == "int8":  # a unit for a row of 65, two for 257, one for a single number; bytes in fours
        in_moments = 33 * (4 + 68) + (2 * 4 + 260) + (4 + 4)
        assert MOMENTS["int8"] == blocks.row_bytes(4096) / 4096
    assert stored - powers == 2 * in_moments + MASTER_WEIGHTS[master_weights] * sum(map(math.prod, SHAPES))


def test_remainders_change_nothing_but_the_bytes(generator, seed):
    """Master weights, moments and, but for ties, weights are those of float32 master weights, bit for bit."""
    arrays = [generator.standard_normal(shape).astype("float32") for shape in SHAPES]
    runs = []
    for master_weights in MASTER_WEIGHTS:
        parameters, optimizer = make(arrays, "bfloat16", seed, moments="bfloat16", master_weights=master_weights)
        train(parameters, optimizer, np.random.default_rng(seed), 5)
        runs.append((parameters, tensors_of(optimizer)))
    (plain, want), (compact, got) = runs
    for one, other in zip(plain, compact, strict=True):
        key = f"master weight {one.name}"
        joined = join_master(other, got.pop(key)).numpy()
        np.testing.assert_array_equal(joined, wide(want[key]))
        tie = bits_of(joined) & 0xFFFF == 0x8000
        assert ((wide(one) == wide(other)) | tie).all()
    assert all((wide(tensor) == wide(want[name])).all() for name, tensor in got.items())


@pytest.mark.parametrize("kept, cut", [(COMPACT, 37), (SMALLEST, 512)], ids=["bfloat16", "int8"])
def test_slices_of_a_weight_are_rounded_as_the_whole(generator, seed, kept, cut):
    """Blocks of 8 bits begin at a slice's beginning, so that those of 256 are the whole's where it is a multiple."""
    array = generator.standard_normal(700).astype("float32")
    grads = generator.standard_normal((4, 700)).astype("float32")

    def moments(begin, end):
        (weight,), optimizer = make([array[begin:end]], "float32", seed, **kept)
        optimizer.first_elements = {weight.name: begin}
        for grad in grads:
            optimizer._apply_optimize(None, None, [(weight, paddle.to_tensor(grad[begin:end]))])
            optimizer._learning_rate.step()
        return [wide(optimizer._accumulators[kind][weight.name]) for kind in ("moment1", "moment2")]

    for whole, first, rest in zip(moments(0, 700), moments(0, cut), moments(cut, 700), strict=True):
        np.testing.assert_array_equal(whole, np.concatenate([first, rest]))


def test_what_is_refused():
    weight = paddle.create_parameter([4], "float32")
    schedule = paddle.optimizer.lr.LinearWarmup(1e-2, 3, 0.0, 1e-2)
    for optimizer in (
        paddle.optimizer.Adam(schedule, parameters=[weight]),
        paddle.optimizer.AdamW(schedule, parameters=[{"params": [weight]}]),
        paddle.optimizer.AdamW(schedule, parameters=[weight], amsgrad=True),
        paddle.optimizer.AdamW(1e-3, parameters=[weight]),
    ):
        before = type(optimizer)
        with pytest.raises(ValueError, match="AdamW"):
            keep_compact(optimizer, **COMPACT)
        keep_compact(optimizer, "float32", "float32")
        assert type(optimizer) is before
