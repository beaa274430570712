"""Read, write and grow checkpoints, and join them into ensembles. No fairseq imports."""

import errno
import zipfile
from pathlib import Path

from fairseq_alma.files import once_per_file

LAST_CHECKPOINT = "checkpoint_last.pt"
"""File name of the latest checkpoint of fairseq-train, from which fairseq-train resumes by default."""
JOINT_MODEL = "alma_umix"
"""Architecture with several member models, which are trained jointly on the mean or sum of their logits."""
TASK_STATE, IMAGE_TASK_STATE = "AlmaLMTask", "AlmaImageClassificationTask"
"""Keys of ``extra_state`` for the state of training features: the class names of the tasks for text and images."""
TRAIN_TOKENS, FIRST_UPDATE, AVERAGE = "train_tokens", "first_update", "average"
"""Keys of the state of training features: ``train_tokens``, number of training tokens of the stage, summed over epochs;
``first_update``, number of updates before the stage (with ``--carry-optimizer``); ``average``, averaged fp32 weights by
parameter name."""


class UnfitCheckpoint(ValueError):
    """Error for a file that is not a usable checkpoint. The message has no file name; the caller adds the file name."""


@once_per_file
def check_archive(path: Path) -> None:
    """Raise UnfitCheckpoint if a checksum in the zip archive is wrong; ``torch.load`` does not verify checksums."""
    if not zipfile.is_zipfile(path):
        raise UnfitCheckpoint(f"not a checkpoint, or truncated ({path.stat().st_size:,} bytes, not a zip archive)")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # BadZipFile, NotImplementedError, RuntimeError, struct.error and others
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: negative offset in the file
            raise
        raise UnfitCheckpoint(f"damaged or truncated: cannot read the zip directory ({error})") from error
    if damaged is not None:
        raise UnfitCheckpoint(f"damaged: the checksum of {damaged!r} in the archive is wrong")
