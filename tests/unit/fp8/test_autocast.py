import threading

import pytest

from paddle_te import fp8
from paddle_te.fp8 import DelayedScaling, Float8CurrentScaling, fp8_autocast, microbatch


class Group:
    nranks = 1


def state():
    return fp8.is_fp8_enabled(), fp8.get_fp8_recipe(), fp8.get_fp8_group()


def test_off_by_default():
    assert state() == (False, DelayedScaling(), None)
    assert fp8.get_autocast_state().is_first_microbatch is None


def test_nesting_restores():
    group, current = Group(), Float8CurrentScaling()
    with fp8_autocast(fp8_group=group):
        assert state() == (True, DelayedScaling(), group)
        with fp8_autocast(fp8_recipe=current):
            assert state() == (True, current, None)
            with fp8_autocast(enabled=False):
                assert not fp8.is_fp8_enabled()
            assert state() == (True, current, None)
        assert state() == (True, DelayedScaling(), group)
    assert state() == (False, DelayedScaling(), None)


def test_restored_after_an_exception():
    with pytest.raises(KeyError), fp8_autocast(), microbatch(True):
        raise KeyError
    assert state() == (False, DelayedScaling(), None)
    assert fp8.get_autocast_state().is_first_microbatch is None


def test_one_object_can_be_entered_again_and_inside_itself():
    scope = fp8_autocast()
    for _ in range(2):
        with scope:
            with fp8_autocast(enabled=False):
                with scope:
                    assert fp8.is_fp8_enabled()
                assert not fp8.is_fp8_enabled()
            assert fp8.is_fp8_enabled()
        assert not fp8.is_fp8_enabled()


def test_decorator():
    assert fp8_autocast()(fp8.is_fp8_enabled)()
    assert not fp8.is_fp8_enabled()


def test_microbatch_and_autocast_do_not_touch_each_other():
    with microbatch(True):
        with fp8_autocast():
            assert fp8.get_autocast_state().is_first_microbatch is True
            with microbatch(False):
                assert fp8.is_fp8_enabled()
                assert fp8.get_autocast_state().is_first_microbatch is False
            assert fp8.get_autocast_state().is_first_microbatch is True


def test_a_captured_state_comes_back_whole():
    group = Group()
    with fp8_autocast(fp8_recipe=Float8CurrentScaling(), fp8_group=group), microbatch(False):
        captured = fp8.get_autocast_state()
    with fp8.autocast_state(captured):
        assert state() == (True, Float8CurrentScaling(), group)
        assert fp8.get_autocast_state().is_first_microbatch is False
    assert not fp8.is_fp8_enabled()


@pytest.mark.parametrize("arguments", [dict(fp8_recipe="delayed"), dict(fp8_recipe=DelayedScaling), dict(fp8_group=3)])
def test_wrong_arguments_are_named(arguments):
    (name,) = arguments
    with pytest.raises(TypeError, match=f"{name}="):
        fp8_autocast(**arguments)


def test_wrong_microbatch():
    with pytest.raises(ValueError, match="is_first="):
        microbatch("first")


def test_threads_have_states_of_their_own():
    """Which enter and leave in any order."""
    barrier, seen = threading.Barrier(2, timeout=30), {}

    def run(name, recipe):
        with fp8_autocast(fp8_recipe=recipe):
            barrier.wait()
            if name == "last":
                barrier.wait()
            seen[name] = fp8.get_fp8_recipe()
        if name == "first":
            barrier.wait()
        seen[name, "left"] = fp8.is_fp8_enabled()

    recipes = {"first": Float8CurrentScaling(), "last": DelayedScaling(margin=1)}
    threads = [threading.Thread(target=run, args=item) for item in recipes.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == recipes | {("first", "left"): False, ("last", "left"): False}
    assert not fp8.is_fp8_enabled()
