"""``alma-stream`` that saves an unfinished training after every epoch, for tests that kill it."""

from fairseq_alma.backends.images import image_backend
from fairseq_alma.cli.stream import main

if __name__ == "__main__":
    image_backend.SAVE_EVERY_SECONDS = 0.0
    raise SystemExit(main())
