"""How a command ends: its exit status, and one line for what a user can mend."""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator

from paddle_te.outputs import DISK_FAULTS
from paddle_te.runs import screen
from paddle_te.runs.checkpoints import CheckpointNotSaved
from paddle_te.runs.rollback import RunEnded
from paddle_te.weights import CheckpointError

logger = logging.getLogger(__name__)

GO_ON = "Complete checkpoints are untouched: --resume_from_checkpoint auto goes on from the newest"


@contextlib.contextmanager
def refusing_wrong_input() -> Iterator[None]:
    """End the process with status 2 where the block raises an error in the arguments or the data.

    The user reads one line: the launcher prints the end of the failing rank's log.
    """
    try:
        yield
    except RunEnded:  # a RuntimeError that has a status of its own
        raise
    except (ValueError, OSError, RuntimeError) as error:
        logger.error(str(error))
        sys.exit(2)


@screen.shown()
def run_to_end(command: Callable[[], object]) -> None:
    """Call command().

    Ends the process with 2 for a checkpoint that turns out not to be whole, with 1 where a checkpoint or another
    file could not be written or numbers are not finite, with `runs.rollback.ROLLED_BACK` where the run is to be
    started again.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        command()
    except CheckpointError as error:  # seen only when its tensors were read
        logger.error(str(error))
        sys.exit(2)
    except CheckpointNotSaved as error:
        logger.error(str(error))
        sys.exit(1)
    except RunEnded as error:
        logger.error(str(error))
        sys.exit(error.status)
    except KeyboardInterrupt:
        logger.error(f"interrupted by Ctrl-C. {GO_ON}")
        raise
    except OSError as error:
        if error.errno not in DISK_FAULTS:
            raise
        logger.error(
            f"{error.filename or 'a file of this run'} could not be written: {error.strerror}. Make room. {GO_ON}"
        )
        sys.exit(1)
