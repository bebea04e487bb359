"""Where a merged model may be written."""

from types import SimpleNamespace

import pytest

from paddle_te.hosts.paddlenlp.training.merging import check_mergeable
from paddle_te.weights import CheckpointError


@pytest.mark.parametrize("do_train", [True, False])
def test_what_is_in_the_way(tmp_path, do_train):
    """A folder that is not empty is, where nothing is trained; a run that trains has left it when it ended before."""
    merged, args = tmp_path / "merged", SimpleNamespace(output_dir=tmp_path, do_train=do_train)
    check_mergeable(args)
    merged.touch()
    with pytest.raises(CheckpointError, match="merged: is a file"):
        check_mergeable(args)
    merged.unlink()
    merged.mkdir()
    check_mergeable(args)
    (merged / "config.json").touch()
    if do_train:
        check_mergeable(args)
        return
    with pytest.raises(CheckpointError, match="merged: not empty"):
        check_mergeable(args)
