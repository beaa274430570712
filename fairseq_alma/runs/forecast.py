"""How long the rest of a run takes, judged by the part that is over."""

from typing import Iterable, Mapping, Optional

from fairseq_alma.learners.plan import ModelId


class Forecast:
    """Forecasts the seconds that remain of a run.

    Trainings are taken to last as long as their work says, and what comes with them (growth, tests) likewise.

    Args:
        work: of each training that lies ahead, in any unit: updates, images, words.
    """

    def __init__(self, work: Mapping[ModelId, float]) -> None:
        self.ahead = dict(work)
        self.work = 0.0
        self.seconds = 0.0

    def finish(self, models: Iterable[ModelId], seconds: float) -> None:
        """Note that the trainings of some models took this long."""
        self.work += sum(self.ahead.pop(model, 0.0) for model in models)
        self.seconds += seconds

    def add(self, seconds: float) -> None:
        """Note the seconds of something beside the trainings."""
        self.seconds += seconds

    def drop(self, models: Iterable[ModelId]) -> None:
        """Leave out trainings that turned out to be there already."""
        for model in models:
            self.ahead.pop(model, None)

    def seconds_left(
        self, now: Iterable[ModelId] = (), whole: Optional[float] = None, rest: Optional[float] = None
    ) -> Optional[float]:
        """Return the seconds that remain.

        Args:
            now: the models that are trained at this time.
            whole: seconds that their training takes in all; None: not known.
            rest: seconds that remain of that; None: not known.

        Returns:
            The forecast; None if nothing is known yet.
        """
        ahead = sum(self.ahead.values())
        here = sum(self.ahead.get(model, 0.0) for model in now)
        if whole is None or rest is None or not here:
            return self.seconds / self.work * ahead if self.work else None
        return rest + (self.seconds + whole) / (self.work + here) * (ahead - here)
