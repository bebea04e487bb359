"""A planned job from its first start to its last end: the folder's lock, the nodes' meeting, all starts."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from paddle_te.host import HOSTS, installed
from paddle_te.launch import JobModule
from paddle_te.launch.devices import find_devices, has_gpu
from paddle_te.launch.errors import LaunchError
from paddle_te.launch.flags import extra_flags, ranks_of_a_sequence, trains
from paddle_te.launch.nodes import several_tasks
from paddle_te.launch.peers import JOIN_SECONDS, Peers
from paddle_te.launch.plan import Plan, plan_for
from paddle_te.launch.restart import REFUSED, Restarts, fewer, restarted
from paddle_te.launch.supervise import OTHER_NODE_DIED, OTHER_NODE_FAILED, Outcome, Supervisor, say
from paddle_te.launch.watchdog import Watchdog
from paddle_te.outputs import DISK_FAULTS
from paddle_te.runs.background import remove_leftovers
from paddle_te.runs.checkpoints import set_aside
from paddle_te.runs.lock import FolderInUse, FolderLock


def run(job: JobModule, plan: Plan, args: argparse.Namespace) -> int:
    """Return the exit status: 0, the failed process's (128 + n if signal n ended it), or 2 where it may not start.

    1 where the launcher itself cannot write.
    """
    try:
        return _run(job, plan, args)
    except OSError as error:
        if error.errno not in DISK_FAULTS:
            raise
        name = error.filename or f"a file in {plan.folder}"
        print(
            f"error: {name} could not be written: {error.strerror}; make room, or choose another folder",
            file=sys.stderr,
        )
        return 1


def _run(job: JobModule, plan: Plan, args: argparse.Namespace) -> int:
    lock = peers = None
    try:
        if plan.nodes.rank == 0:
            lock = FolderLock(plan.output)
            if not lock.works:
                say(f"the file system of {plan.output} knows no locks: take care that one run uses it at a time")
        if plan.nodes.count > 1:
            peers = Peers(plan.nodes, plan.processes, _token(), args.START_TIMEOUT or JOIN_SECONDS)
    except LaunchError as error:
        return _refused(str(error))
    except FolderInUse as error:
        # on one node tasks may be runs of their own, each in its own folder
        return _refused(several_tasks(os.environ) or str(error))
    try:
        for folder in plan.folders:
            folder.mkdir(parents=True, exist_ok=True)
        if plan.nodes.rank == 0 and trains(args) and (kept := set_aside(plan.output, args.resume_step)):
            say(f"what an earlier run left and this one would write over is now in {kept}")
        if peers and peers.meet(say) is None:
            say(str(peers.failure))
            return OTHER_NODE_DIED if peers.died else OTHER_NODE_FAILED
        say(f"the host is {HOSTS[args.HOST]} (HOST={args.HOST}{_alone()})")
        return _starts(job, plan, args, peers)
    finally:
        if peers:
            peers.close()
        if staging := extra_flags(args).get("staging_dir"):
            remove_leftovers(Path(str(staging)))  # ranks that were killed could not
        if lock:
            lock.release()


def _refused(why: str) -> int:
    print(f"error: {why}", file=sys.stderr)
    return REFUSED


def _alone() -> str:
    return "" if len(installed()) > 1 else ", the one that is installed"


def _token() -> str:
    token = os.environ.get("JOB_TOKEN", "")
    if not token:
        say("JOB_TOKEN is not set: whoever reaches MASTER's ports can take a node's place; give all nodes the same")
    return token


def _starts(job: JobModule, plan: Plan, args: argparse.Namespace, peers: Peers | None) -> int:
    """Start the processes as often as they may be. Return the last start's exit status."""
    restarts = Restarts(args.MAX_RESTARTS)
    watchdog = Watchdog(args.STEP_TIMEOUT, args.START_TIMEOUT)
    while True:
        plan.write_files()
        print(f"+ {plan.shell()}", file=sys.stderr, flush=True)
        outcome = _start(plan, args, peers, watchdog)
        why_not = restarts.why_not(outcome)
        if why_not:
            say(why_not)
        if outcome.status == 0 or why_not is not None and not peers:
            return outcome.exit_status
        if peers and not (args.MAX_RESTARTS and peers.agree(why_not is None)):
            return outcome.exit_status
        restarts.count += 1
        try:
            plan, args = _anew(job, plan, args)
        except LaunchError as error:
            say(f"not started again: {error}")
            return outcome.exit_status
        say(f"start {restarts.count + 1} of at most {args.MAX_RESTARTS + 1}, {_origin(args)}")


def _start(plan: Plan, args: argparse.Namespace, peers: Peers | None, watchdog: Watchdog) -> Outcome:
    env = {key: value for key, value in os.environ.items() if key not in plan.unset} | plan.env
    return Supervisor(
        plan.command_on(peers.hosts if peers else None),
        env,
        script=plan.script,
        processes=plan.processes,
        logs=plan.logs,
        peers=peers,
        watchdog=watchdog,
        grace=args.TERM_GRACE,
    ).run()


def _anew(job: JobModule, plan: Plan, args: argparse.Namespace) -> tuple[Plan, argparse.Namespace]:
    """Return the next start's plan and arguments, on the devices that are left with ELASTIC=1.

    Raises:
        LaunchError: devices are gone, and the job cannot go on without them.
    """
    args = restarted(args, plan.folder, plan.output)
    if args.ELASTIC:
        args = _on_what_is_left(plan, args)
    return plan_for(job, args, os.environ), args


def _on_what_is_left(plan: Plan, args: argparse.Namespace) -> argparse.Namespace:
    kind, wanted = plan.devices.kind, plan.devices.by_uuid or plan.devices.ids
    there = find_devices(argparse.Namespace(**vars(args) | dict(DEVICE=kind, DEVICES=None)), os.environ)
    is_there = (lambda name: has_gpu(name, os.environ)) if plan.devices.by_uuid else there.visible.__contains__
    visible = [each for each in wanted if is_there(each)]
    if len(visible) == len(wanted):
        return args
    gone = ", ".join(each for each in wanted if each not in visible)
    made, model = fewer(args, visible, len(wanted)), ranks_of_a_sequence(args)
    if made is None:
        raise LaunchError(f"devices {gone} are gone, and TP x PP x SEP x CP = {model} devices are not left")
    say(
        f"devices {gone} are gone: FSDP from {args.FSDP} to {made.FSDP}, data ranks from "
        f"{len(wanted) // model} to {len(made.DEVICES) // model}, "
        f"GA from {args.GA} to {made.GA}, on devices {','.join(made.DEVICES)}"
    )
    return made


def _origin(args: argparse.Namespace) -> str:
    return (
        "from the newest checkpoint" if args.resume_step == "auto" else "as the first, for there is no checkpoint yet"
    )
