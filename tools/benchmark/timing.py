"""Timing of steps that different frameworks launch on their own CUDA streams, interleaved in one process."""

import ctypes
import gc
import statistics
import time
from contextlib import contextmanager

from tools.benchmark import report


class _Event(ctypes.c_void_p):
    """A CUevent that is destroyed when nothing refers to it any more."""

    def __init__(self, driver):
        super().__init__()
        self._driver = driver

    def __del__(self):
        if self:
            self._driver.cuEventDestroy_v2(self)


class CudaClock:
    """Events of the CUDA driver: the same clock for every framework, and no second CUDA runtime in the process.

    Needs a current CUDA context, which a framework's first allocation makes. Raises OSError where there is no
    driver, RuntimeError when a call fails (a kernel's fault shows here too).
    """

    def __init__(self, driver=None):
        self._driver = driver or ctypes.CDLL("libcuda.so.1")

    def _call(self, name, *args):
        if code := getattr(self._driver, name)(*args):
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")

    def record(self, stream):
        """An event that happens when the work launched so far on `stream` (a cudaStream_t as an int) is done."""
        event = _Event(self._driver)
        self._call("cuEventCreate", ctypes.byref(event), 0)
        self._call("cuEventRecord", event, ctypes.c_void_p(stream))
        return event

    def elapsed_ms(self, start, stop):
        """Milliseconds between two events that have happened."""
        ms = ctypes.c_float()
        self._call("cuEventElapsedTime", ctypes.byref(ms), start, stop)
        return ms.value

    def synchronize(self):
        """Waits for all work on the device."""
        self._call("cuCtxSynchronize")

    def host_us(self):
        return time.perf_counter_ns() / 1e3


class HostClock:
    """The same interface for peers on a CPU, where a step has ended when its call returns."""

    def record(self, stream):
        return time.perf_counter_ns()

    def elapsed_ms(self, start, stop):
        return (stop - start) / 1e6

    def synchronize(self):
        pass

    def host_us(self):
        return time.perf_counter_ns() / 1e3


class ThreadClock(HostClock):
    """The same, of what this thread has computed: other programs that the machine runs do not lengthen it."""

    def host_us(self):
        return time.thread_time_ns() / 1e3


def add_options(parser, benchmark, rounds, iterations, warmup, quick):
    """The options that all timed benchmarks have, with their defaults; quick: (rounds, iterations, warmup)."""
    report.add_destination(parser, benchmark)
    parser.add_argument("--rounds", type=int, default=rounds, help="of peers in turn; default %(default)s")
    parser.add_argument("--iterations", type=int, default=iterations, help="timed steps in each; default %(default)s")
    parser.add_argument("--warmup", type=int, default=warmup, help="untimed steps before them; default %(default)s")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tries this program out")
    parser.add_argument("--quick", action="store_true", help=f"rounds, iterations, warmup = {quick}: do all run?")
    parser.set_defaults(quick_settings=quick)


def parse_options(parser, argv, at_least_one=()):
    """The arguments, with --quick's settings in place. Exits for numbers that leave nothing to measure."""
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.rounds, arguments.iterations, arguments.warmup = arguments.quick_settings
    for name in ("rounds", "iterations", *at_least_one):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be 1 or more")
    return arguments


def make_clock(arguments):
    clocks = {"cpu": HostClock, "host": ThreadClock}
    return clocks.get(arguments.device, CudaClock)()


@contextmanager
def _no_garbage_collection():
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def time_steps(clock, peer, iterations, warmup):
    """Milliseconds of each of `iterations` steps on the peer's stream, after `warmup` untimed ones."""
    for _ in range(warmup):
        peer.step()
    clock.synchronize()
    events = []
    with _no_garbage_collection():
        for _ in range(iterations):
            start = clock.record(peer.stream)
            peer.step()
            events.append((start, clock.record(peer.stream)))
        clock.synchronize()
    return [clock.elapsed_ms(*pair) for pair in events]


def time_enqueue(clock, peer, iterations, warmup):
    """Host microseconds that each step's call takes to return, the device idle when it begins."""
    for _ in range(warmup):
        peer.step()
    times = []
    with _no_garbage_collection():
        for _ in range(iterations):
            clock.synchronize()
            start = clock.host_us()
            peer.step()
            times.append(clock.host_us() - start)
        clock.synchronize()
    return times


def interleave(measure, peers, rounds, on_failure):
    """Lists of `measure(peer)` for each name of `peers`, one list a round.

    Each round begins with another peer, so that a slow drift of the chip's clocks or temperature meets all alike.
    A peer that raises leaves: `on_failure(name, error)` is told, and its times are dropped.
    """
    alive = dict(peers)
    times = {name: [] for name in peers}
    for number in range(rounds):
        names = list(alive)
        first = number % max(len(names), 1)
        for name in names[first:] + names[:first]:
            try:
                times[name].append(measure(alive[name]))
                alive[name].release()
            except Exception as error:  # one peer's failure must not cost the others' results
                del alive[name], times[name]
                on_failure(name, error)
    return times


def summarize(rounds):
    """{"median", "min", "max", "rounds"}: over the rounds' medians, and every single time as it was measured."""
    medians = [statistics.median(times) for times in rounds]
    return {
        "median": statistics.median(medians),
        "min": min(medians),
        "max": max(medians),
        "rounds": [[round(value, 4) for value in times] for times in rounds],
    }
