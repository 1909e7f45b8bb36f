"""run/train.py, in which one rank dies, hangs or lags: faulty.py HOW WHEN RANK NOTE, and then the flags.

HOW: kill, stop (SIGSTOP), pause (SIGSTOP, and on after eight seconds), raise, exit, slow (at every call).
WHEN: before (the ranks have met), start, step (the third), save. NOTE: the file that the fault's time is written to.
"""

import functools
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

TRAIN = Path(__file__).parents[2] / "run" / "train.py"
PAUSE_S, SLOW_S, STEP_S, WINDOW_S = 8, 1.0, 0.4, 8.0


def fault(how: str, note: Path) -> None:
    if how != "slow":
        time.sleep(0.5)  # until the others have heard where this rank is
    if not note.exists():
        note.write_text(str(time.time()))
    pid = os.getpid()
    if how == "kill":
        os.kill(pid, signal.SIGKILL)
    elif how == "stop":
        os.kill(pid, signal.SIGSTOP)
    elif how == "pause":
        subprocess.Popen(["sh", "-c", f"sleep 1; kill -STOP {pid}; sleep {PAUSE_S}; kill -CONT {pid}"])
        time.sleep(2)
    elif how == "raise":
        raise RuntimeError("boom")
    elif how == "exit":
        os._exit(3)
    elif how == "slow":
        time.sleep(SLOW_S)


def before_nth(function, n: int, act):
    """The function, with act() before its n-th call, and before all later ones where that comes back."""
    calls = 0

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls >= n:
            act()
        return function(*args, **kwargs)

    return wrapped


def main() -> None:
    how, when, rank, note, *flags = [token for token in sys.argv[1:] if not token.startswith("--local_rank")]
    act = functools.partial(fault, how, Path(note))
    if os.environ["RANK"] == rank and when == "before":
        act()
    from llava_ds.checkpoint import saver as saving
    from llava_ds.engine import construct as build
    from llava_ds.model.llava import LlavaModel
    from llava_ds.runtime import watchdog

    # As long as a beat takes, as with real models: what is last heard of a rank is then its last step.
    LlavaModel.forward = before_nth(LlavaModel.forward, 1, functools.partial(time.sleep, STEP_S))
    watchdog.Watchdog = functools.partial(watchdog.Watchdog, window_s=WINDOW_S)
    if os.environ["RANK"] == rank:
        if when == "start":
            build.build_model = before_nth(build.build_model, 1, act)
        elif when == "save":
            saving.save_engine = before_nth(saving.save_engine, 1, act)
        elif when == "step":
            if how == "pause":  # once
                act = functools.lru_cache(act)
            LlavaModel.forward = before_nth(LlavaModel.forward, 3, act)
    sys.argv = [str(TRAIN), *flags]
    runpy.run_path(str(TRAIN), run_name="__main__")


if __name__ == "__main__":
    main()
