"""The columns at the left of a table that name an experiment, without those that would say the same in every row."""

from typing import Callable, Sequence

from fairseq_alma.report.experiment import Experiment
from fairseq_alma.report.table import TableCell, name_cell

_OPTIONAL: tuple[tuple[str, Callable[[Experiment], str]], ...] = (
    ("size", lambda experiment: experiment.size),
    ("options", lambda experiment: experiment.note),
)


class NameColumns:
    """Learner, and where experiments differ in them the size of the backbone and other options; then the experts.

    Args:
        groups: all experiments of the table.
    """

    def __init__(self, groups: Sequence[Experiment]) -> None:
        self._optional = [
            (title, text) for title, text in _OPTIONAL if len({text(experiment) for experiment in groups}) > 1
        ]
        self.header = ["learner", *(title for title, _ in self._optional), _parts(groups)]

    def cells(self, experiment: Experiment) -> list[TableCell]:
        """Return the cells of an experiment."""
        texts = [experiment.label, *(text(experiment) for _, text in self._optional), experiment.first.experts]
        return [name_cell(text) for text in texts]

    def plain(self, experiment: Experiment) -> list[str]:
        """Return the same for programs."""
        return [cell.text for cell in self.cells(experiment)]


def _parts(groups: Sequence[Experiment]) -> str:
    """Name the column that says what a model is made of."""
    return "experts" if all(experiment.first.is_text for experiment in groups) else "experts or models"


def by_settings(groups: Sequence[Experiment]) -> dict[str, Experiment]:
    """Return the experiment that each run belongs to, by its settings."""
    return {experiment.first.settings: experiment for experiment in groups}
