"""A pickle that runs a command when it is loaded, as an attacker would send it among numbers."""

import os
import pickle


class _Payload:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def hostile_pickle(witness):
    """Bytes that, unpickled, make the file `witness`."""
    return pickle.dumps({"weight": _Payload(f"touch {witness}")}, protocol=4)


def assert_it_works(tmp_path):
    """Such a pickle does what it threatens: otherwise a test of its refusal would prove nothing."""
    pickle.loads(hostile_pickle(tmp_path / "ran"))
    assert (tmp_path / "ran").exists()
    (tmp_path / "ran").unlink()
