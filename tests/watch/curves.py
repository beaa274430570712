"""Curves as TensorBoard reads them; tests that need it are skipped where it is not installed."""

from pathlib import Path

import pytest


class Curves:
    """Curves of one folder, read on with each call, as a TensorBoard that is open does (without its fast reader)."""

    def __init__(self, folder: Path) -> None:
        reader = pytest.importorskip("tensorboard.backend.event_processing.plugin_event_accumulator")
        # Size 0: all points, not a sample of them.
        self.events = reader.EventAccumulator(str(folder), size_guidance={reader.TENSORS: 0})

    def read(self, tag: str) -> list[tuple[int, float, float]]:
        """Return step, value and wall time of each point."""
        from tensorboard.util.tensor_util import make_ndarray

        self.events.Reload()
        return [
            (event.step, make_ndarray(event.tensor_proto).item(), event.wall_time) for event in self.events.Tensors(tag)
        ]

    def steps(self, tag: str) -> list[int]:
        """Return the step of each point."""
        return [step for step, _, _ in self.read(tag)]
