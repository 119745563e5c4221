"""Of several threads that end a process, one decides."""

import os
import subprocess
import sys
import threading

from rollout.process.watchdog import End

PATIENCE_S = 60
RACE = """
import os, threading, time
from rollout.process.watchdog import End

def end_within(seconds, status):
    threading.Timer(seconds, os._exit, [status]).start()

end = End(end_within)
assert end.begin("a peer is lost", 3, within_s=0.2)
assert not end.begin("the loop hangs", 4, within_s=0.0)
end.wait()
"""


def test_the_first_thread_says_why_and_with_which_status():
    deadlines, begun = [], []
    end = End(lambda seconds, status: deadlines.append((seconds, status)))
    ready = threading.Barrier(8)

    def begin(status: int) -> None:
        ready.wait(PATIENCE_S)
        if end.begin(f"reason {status}", status, within_s=5.0):
            begun.append(status)

    threads = [threading.Thread(target=begin, args=[status]) for status in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert begun == [end.status] and end.reason == f"reason {end.status}" and deadlines == [(5.0, end.status)]


def test_a_thread_that_comes_later_waits_for_the_exit():
    ran = subprocess.run([sys.executable, "-c", RACE], timeout=PATIENCE_S, env=dict(os.environ))
    assert ran.returncode == 3
