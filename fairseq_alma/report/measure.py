"""What is measured on each kind of data, and how it is spelled: perplexity of text, error of images."""

from dataclasses import dataclass
from typing import Optional

from fairseq_alma.metrics.table import show_number
from fairseq_alma.report.run_figures import IMAGES, TEXT
from fairseq_alma.report.spread import Spread


@dataclass(frozen=True)
class Measure:
    """How a kind of data is reported.

    Attributes:
        name: of the test value, also of its table.
        final: title of the value after the last update.
        anytime: title of its sum or mean over all arrivals.
        anytime_digits: decimals of that.
        scale: what a value is shown in units of; 100 for percent.
        unit: of the shown value.
        per: what test FLOPs are counted for.
        plural: things in a stream.
    """

    name: str
    final: str
    anytime: str
    anytime_digits: int
    scale: float
    unit: str
    per: str
    plural: str

    def show(self, value: Optional[float]) -> str:
        """Spell a value; ``*`` for None (waiting), ``–`` for NaN (not run yet)."""
        return show_number(None if value is None else value * self.scale, 2)

    def show_spread(self, spread: Optional[Spread]) -> str:
        """Spell mean ± deviation of a value."""
        return "–" if spread is None else spread.show(2, self.scale)

    def show_anytime(self, spread: Optional[Spread]) -> str:
        """Spell mean ± deviation of the sum or mean over all arrivals."""
        return "–" if spread is None else spread.show(self.anytime_digits)


MEASURES = {
    TEXT: Measure("perplexity", "final PPL", "avg PPL", 2, 1, "perplexity", "token", "tokens"),
    IMAGES: Measure("error", "final error", "CER", 1, 100, "percent", "image", "images"),
}
