"""On ``PYTHONPATH`` of ``alma-stream``: SIGKILLs it, from the process that trains, at the n-th checkpoint in a folder.

``ALMA_KILL_AT=N:FOLDER``: right after the n-th checkpoint was renamed to its final name within the folder, from 1.
"""

import os
import signal
import sys

MAIN = "ALMA_KILL_PID"
saves = int(os.environ.get("ALMA_KILL_AT", "0:").partition(":")[0])
folder = os.environ.get("ALMA_KILL_AT", "0:").partition(":")[2]


def count_saves(event, arguments):
    global saves
    if event == "os.rename" and str(arguments[1]).startswith(folder) and str(arguments[1]).endswith(".pt"):
        saves -= 1
        if saves < 0:  # the event comes before the rename: the one before this is done
            os.kill(int(os.environ[MAIN]), signal.SIGKILL)


if saves:
    os.environ.setdefault(MAIN, str(os.getpid()))  # children inherit it
    sys.addaudithook(count_saves)
