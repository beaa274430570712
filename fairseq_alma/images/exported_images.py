"""Builds a model of images from a folder that ``alma-export`` wrote.

from fairseq_alma.images.exported_images import load_exported_images
model, images = load_exported_images("FOLDER")
mean, std = (torch.tensor(each)[:, None, None] for each in (images.mean, images.std))
logits = model((pixels / 255 - mean) / std)      # pixels (B, C, H, W) from 0 to 255; logits (B, K)
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Union

import fairseq.models
from omegaconf import OmegaConf

from fairseq_alma.exchange.image_folder import ImagesRecord, read_folder
from fairseq_alma.training.loading import refuse_other_weights


def load_exported_images(folder: Union[str, Path]) -> tuple[Any, ImagesRecord]:
    """Load a model of images, or an ensemble, on the CPU.

    Args:
        folder: that ``alma-export`` wrote.

    Returns:
        The model, which maps (B, C, H, W) normalised images to (B, K) logits, in evaluation mode; and what it looks at.

    Raises:
        AlmaError: the folder is none, or damaged.
    """
    record, weights = read_folder(Path(folder))
    images = record.images
    task = SimpleNamespace(image_shape=images.shape, num_classes=images.num_classes, checkpoint_path=None)
    model = fairseq.models.build_model(OmegaConf.create(record.model), task, from_checkpoint=True)
    refuse_other_weights(model, str(folder))
    model.load_state_dict(weights, strict=True)
    return model.eval(), images
