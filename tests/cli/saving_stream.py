"""``alma-stream`` on images that saves an unfinished training after every epoch, and is killed at a save."""

import os
import signal
import sys

from fairseq_alma.cli.stream import main
from fairseq_alma.images import image_backend, model_store
from tests.scripts import end_with


def run_saving(argv=None, kill_at=0):
    """Run the command; with ``kill_at`` SIGKILL this process right after so many saves.

    A save is one of an unfinished training or of a trained model.
    """
    left = [kill_at]

    def killing(save):
        def save_and_count(*arguments):
            save(*arguments)
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        return save_and_count

    image_backend.SAVE_EVERY_SECONDS = 0.0
    image_backend.write_unfinished = killing(image_backend.write_unfinished)
    model_store.write_model = killing(model_store.write_model)
    return main(argv)


def run_forked(argv, kill_at=0):
    """Run the command in a process forked from this one, which has imported all; return its exit status as Popen's."""
    child = os.fork()
    if child == 0:
        end_with(lambda: run_saving(argv, kill_at))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    sys.exit(run_saving())
