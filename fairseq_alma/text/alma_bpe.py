"""The stream's own tokenizer as a fairseq BPE, so that text goes in and comes out of fairseq-interactive."""

from dataclasses import dataclass
from typing import Optional

from fairseq.data.encoders import register_bpe
from fairseq.dataclass import FairseqDataclass
from omegaconf import II

from fairseq_alma.data.tokenizer import StreamTokenizer
from fairseq_alma.errors import AlmaError


@dataclass
class AlmaBPEConfig(FairseqDataclass):
    """Where the stream is: the task knows."""

    data: Optional[str] = II("task.data")


@register_bpe("alma", dataclass=AlmaBPEConfig)
class AlmaBPE:
    """Encode text to a line of dictionary symbols and back, as fairseq's encoders do.

    Args:
        cfg: names the stream's folder.
    """

    def __init__(self, cfg: AlmaBPEConfig) -> None:
        if cfg.data is None:
            raise AlmaError("--bpe alma: needs a stream to take the tokenizer from; give the stream's folder")
        self.tokenizer = StreamTokenizer.open(cfg.data)

    def encode(self, x: str) -> str:
        """Return the symbols of a text, separated by spaces."""
        return " ".join(self.tokenizer.encode(x))

    def decode(self, x: str) -> str:
        """Return the text of symbols that are separated by spaces."""
        return self.tokenizer.decode(x.split(" "))
