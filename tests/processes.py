"""Processes that a test started, wherever they are in the process tree."""

import psutil


def with_in_environment(name, value):
    """Every live process with name=value in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:  # gone, or another user's
            pass
    return found
