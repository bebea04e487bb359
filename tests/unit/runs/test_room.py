"""Each node has room for what its ranks write: they share a disk."""

import pytest

from paddle_te.runs.room import Room, check_room


def test_room_is_counted_for_each_node():
    ranks = [Room(("a", 1), 40, 100), Room(("a", 1), 60, 90), Room(("b", 1), 80, 90)]
    with pytest.raises(OSError, match="takes about 0.00 GB, and 0.00 GB are free. Make room"):
        check_room(ranks, "Make room")
    check_room([Room("a", 40, 100), Room("a", 50, 90), Room("b", 80, 90)], "")


def test_ranks_with_one_file_system_share_its_room(tmp_path):
    free = Room.of(tmp_path, 0).free
    ranks = [Room.of(folder, free * 3 // 4) for folder in (tmp_path, tmp_path.parent)]
    check_room(ranks[:1], "")
    with pytest.raises(OSError, match="are free"):
        check_room(ranks, "")
