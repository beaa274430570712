"""What a decoder of several models has in common with others of its kind: members, dictionary, longest sequence."""

from typing import Any, Sequence

from fairseq.data import Dictionary
from fairseq.models import FairseqIncrementalDecoder, FairseqLanguageModel
from torch import nn


class MemberDecoder(FairseqIncrementalDecoder):
    """Several language models behind one decoder.

    fairseq keeps the cache of decoding step by step in one dictionary, under keys that belong to one module each, so
    all members share it; and it reorders the cache by walking over all modules.

    Args:
        dictionary: the vocabulary that all members share.
        members: the models.
    """

    members: Any  # an nn.ModuleList, which hides from mypy that these modules are language models

    def __init__(self, dictionary: Dictionary, members: Sequence[FairseqLanguageModel]) -> None:
        super().__init__(dictionary)
        self.members = nn.ModuleList(members)

    def max_positions(self) -> int:
        """Return the longest sequence that every member can take, in tokens."""
        return min(member.max_positions() for member in self.members)
