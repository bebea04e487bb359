import numpy as np
import paddle
import pytest

from paddle_te import fp8
from paddle_te.fp8 import DelayedScaling, Float8CurrentScaling, Format, ModuleScaling, fp8_autocast
from paddle_te.fp8.emulation import emulated_fp8_attention, emulated_fp8_linear

RECIPE = DelayedScaling(amax_history_len=5)


class Linear(paddle.nn.Layer):
    def __init__(self, gemms=1):
        super().__init__()
        self.fp8 = ModuleScaling(gemms, fp8.amax_and_scale_update)
        self.weight = self.create_parameter([16, 16])

    def forward(self, x):
        for q in self.fp8.begin_forward(self.training):
            x = emulated_fp8_linear(x, self.weight, q)
        return x


class Model(paddle.nn.Layer):
    def __init__(self, order=("first", "second")):
        super().__init__()
        made = {name: Linear(1 + (name == "second")) for name in order}
        self.first = made["first"]
        self.inner = paddle.nn.Sequential(paddle.nn.ReLU(), made["second"])

    def forward(self, x):
        return self.inner(self.first(x))


def train(model, steps, seed, recipe=RECIPE):
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    losses = []
    for step in range(steps):
        x = paddle.to_tensor(np.random.default_rng([seed, step]).normal(0, 3, [4, 16]).astype(np.float32))
        with fp8_autocast(fp8_recipe=recipe):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return losses


def assert_same(a, b):
    assert a.keys() == b.keys() and a["recipe"] == b["recipe"] and a["modules"].keys() == b["modules"].keys()
    for name, module in a["modules"].items():
        assert all(module[key] == b["modules"][name][key] for key in ("done", "fresh"))
        for direction in ("forward", "backward"):
            for key, value in module[direction].items():
                np.testing.assert_array_equal(value, b["modules"][name][direction][key])


def test_names():
    model = Model()
    assert set(fp8.name_modules(model)) == {"first", "inner.1"}
    assert model.inner[1].fp8.name == "inner.1"


def evaluate(model, seed):
    model.eval()
    with paddle.no_grad(), fp8_autocast(fp8_recipe=RECIPE):
        y = model(paddle.to_tensor(np.random.default_rng(seed).normal(0, 3, [4, 16]).astype(np.float32)))
    model.train()
    return y.numpy()


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_resume_is_exact_after_building_in_another_order(tmp_path, seed, steps):
    model = Model()
    train(model, steps, seed)
    path = tmp_path / "fp8_state.tp00_pp00.pdparams"
    fp8.save(path, model, RECIPE)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    before = fp8.state_dict(model, RECIPE)
    assert before["modules"]["inner.1"]["forward"]["amax_history"].shape == (5, 4)
    assert all(module["done"] for module in before["modules"].values())
    evaluated = evaluate(model, seed)
    expected = train(model, 6, seed + 1)
    after = fp8.state_dict(model, RECIPE)

    resumed = Model(order=("second", "first"))
    resumed.set_state_dict(weights)
    fp8.load(path, resumed, RECIPE)
    assert_same(fp8.state_dict(resumed, RECIPE), before)
    np.testing.assert_array_equal(evaluate(resumed, seed), evaluated)
    assert train(resumed, 6, seed + 1) == expected
    assert_same(fp8.state_dict(resumed, RECIPE), after)

    without = Model()
    without.set_state_dict(weights)
    assert train(without, 6, seed + 1) != expected  # the state matters


def test_a_state_from_before_there_was_a_first_step_goes_on_as_it_was_saved(seed):
    """Then all scales began with 1; what was saved in the first step has seen that one."""
    begun = DelayedScaling(amax_history_len=5, first_step="delayed")
    model = Model()
    train(model, 1, seed, begun)
    state = fp8.state_dict(model, begun)
    assert "first_step" not in state["recipe"]
    for module in state["modules"].values():
        assert module.pop("fresh")
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    expected = train(model, 3, seed + 1, begun)
    resumed = Model()
    resumed.set_state_dict(weights)
    fp8.set_state_dict(resumed, state, RECIPE)
    assert not any(module["fresh"] for module in fp8.state_dict(resumed, RECIPE)["modules"].values())
    assert train(resumed, 3, seed + 1) == expected


def test_load_into_a_model_that_has_run(seed):
    model, other = Model(), Model()
    train(model, 4, seed)
    train(other, 3, seed + 1)
    saved = fp8.state_dict(model, RECIPE)
    fp8.set_state_dict(other, saved, RECIPE)
    assert_same(fp8.state_dict(other, RECIPE), saved)
    assert_same(fp8.state_dict(model, RECIPE), saved)  # its neighbour in the same block stays
    other.set_state_dict(model.state_dict())
    assert train(other, 3, seed) == train(model, 3, seed)


def test_weights_quantized_before_a_restore_are_not_used_after_it(seed):
    model = Model()
    saved = fp8.state_dict(model, RECIPE)
    with fp8_autocast(fp8_recipe=RECIPE):
        model.first.fp8.begin_forward(True, True)[0].cache_weight("old")
        assert not model.first.fp8.begin_forward(True, False)[0].update_weight
        fp8.set_state_dict(model, saved, RECIPE)
        assert model.first.fp8.begin_forward(True, False)[0].update_weight


def test_every_bit_pattern_survives(tmp_path, seed):
    model = Model()
    state = fp8.state_dict(model, RECIPE)
    for module in state["modules"].values():
        for direction in ("forward", "backward"):
            for key, value in module[direction].items():
                module[direction][key] = np.random.randint(0, 2**32, value.shape, dtype=np.uint32).view(np.float32)
    fp8.set_state_dict(model, state, RECIPE)
    fp8.save(tmp_path / "state", model, RECIPE)
    other = Model()
    fp8.load(tmp_path / "state", other, RECIPE)
    for name, module in fp8.state_dict(other, RECIPE)["modules"].items():
        for direction in ("forward", "backward"):
            for key, value in module[direction].items():
                assert value.tobytes() == state["modules"][name][direction][key].tobytes()


def test_current_scaling_has_no_state(tmp_path):
    recipe = Float8CurrentScaling()
    assert fp8.state_dict(Model(), recipe)["modules"] == {}
    fp8.save(tmp_path / "state", Model(), recipe)
    fp8.load(tmp_path / "state", Model(), recipe)


@pytest.mark.parametrize(
    "recipe, difference",
    [
        (DelayedScaling(amax_history_len=6), "amax_history_len: 5 there, 6 here"),
        (DelayedScaling(amax_history_len=5, margin=1), "margin: 0 there, 1 here"),
        (DelayedScaling(amax_history_len=5, fp8_format=Format.E4M3), "fp8_format: 'HYBRID' there, 'E4M3' here"),
        (DelayedScaling(amax_history_len=5, fp8_dpa=True), "fp8_dpa: None there, True here"),
        (Float8CurrentScaling(), "name: 'DelayedScaling' there, 'Float8CurrentScaling' here"),
    ],
)
def test_another_recipe_is_refused(tmp_path, recipe, difference):
    fp8.save(tmp_path / "state", Model(), RECIPE)
    with pytest.raises(ValueError, match=difference) as error:
        fp8.load(tmp_path / "state", Model(), recipe)
    assert str(tmp_path / "state") in str(error.value)


def test_missing_and_unknown_modules_are_named_and_nothing_changes(seed):
    model = Model()
    train(model, 3, seed)
    before = fp8.state_dict(model, RECIPE)
    state = fp8.state_dict(Model(), RECIPE)
    state["modules"]["third"] = state["modules"].pop("inner.1")
    with pytest.raises(ValueError, match="lacks modules of this model: inner.1"):
        fp8.set_state_dict(model, state, RECIPE)
    state["modules"]["inner.1"] = state["modules"]["third"]
    with pytest.raises(ValueError, match="modules that this model lacks: third"):
        fp8.set_state_dict(model, state, RECIPE)
    del state["modules"]["third"]
    state["modules"]["inner.1"], state["modules"]["first"] = state["modules"]["first"], state["modules"]["inner.1"]
    with pytest.raises(ValueError, match=r"first, forward amax_history.*\[5, 4\].*\[5, 2\]"):
        fp8.set_state_dict(model, state, RECIPE)
    assert_same(fp8.state_dict(model, RECIPE), before)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        fp8.load(tmp_path / "nowhere", Model(), RECIPE)
    paddle.save({"weight": paddle.ones([2])}, str(tmp_path / "weights"))
    with pytest.raises(ValueError, match="no fp8 scaling state"):
        fp8.load(tmp_path / "weights", Model(), RECIPE)


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "state"
    fp8.save(path, Model(), RECIPE)
    old = path.read_bytes()

    def fail(_, target):
        open(target, "wb").close()
        raise OSError("disk full")

    monkeypatch.setattr(paddle, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        fp8.save(path, Model(), RECIPE)
    assert path.read_bytes() == old


class Attention(paddle.nn.Layer):
    """A GEMM, then attention of its output with itself."""

    def __init__(self):
        super().__init__()
        self.linear = Linear()
        self.core = paddle.nn.Layer()
        self.core.fp8 = ModuleScaling.of_attention(fp8.amax_and_scale_update)

    def forward(self, x):
        x = self.linear(x).unsqueeze([0, 2])
        return emulated_fp8_attention(x, x, x, 0.25, self.core.fp8.begin_forward(self.training))


DPA = DelayedScaling(amax_history_len=5, fp8_dpa=True)


def test_attention_resumes_exactly(tmp_path, seed):
    model = Attention()
    train(model, 7, seed, DPA)
    fp8.save(tmp_path / "state", model, DPA)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    saved = fp8.state_dict(model, DPA)["modules"]["core"]
    assert saved["forward"]["amax_history"].shape == (5, 6) and saved["backward"]["scale"].shape == (3,)
    assert (saved["forward"]["scale"][::2] != 1).all() and (saved["backward"]["scale"] != 1).all()
    expected = train(model, 5, seed + 1, DPA)
    resumed = Attention()
    resumed.set_state_dict(weights)
    fp8.load(tmp_path / "state", resumed, DPA)
    assert train(resumed, 5, seed + 1, DPA) == expected
    assert_same(fp8.state_dict(resumed, DPA), fp8.state_dict(model, DPA))


def test_states_from_before_there_was_attention_in_fp8(tmp_path):
    state = fp8.state_dict(Model(), RECIPE)
    fields = {"name", "margin", "fp8_format", "amax_history_len", "amax_compute_algo", "reduce_amax"}
    assert set(state["recipe"]) == fields
    model = Attention()
    state = fp8.state_dict(model, RECIPE)
    assert set(state["modules"]) == {"linear"}
    fp8.set_state_dict(model, state, RECIPE)
    with pytest.raises(ValueError, match="fp8_dpa: None there, True here"):
        fp8.set_state_dict(model, state, DPA)
    with pytest.raises(ValueError, match="fp8_dpa_bwd: True there, False here"):
        other = DelayedScaling(amax_history_len=5, fp8_dpa=True, fp8_dpa_bwd=False)
        fp8.set_state_dict(model, fp8.state_dict(model, DPA), other)
