"""A stock command: its text for ``--dry-run``, and its run in a child of the helper process."""

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

from fairseq_alma.text.helper import call, group_sizes

LINE_LENGTH = 110
FUNCTIONS = {
    "fairseq-train": "fairseq_cli.train:cli_main",
    "fairseq-eval-lm": "fairseq_alma.text.split_losses:main",
    "alma-grow": "fairseq_alma.cli.grow:main",
}
"""Function of each command's child; a test of several splits is one call, which returns a loss for each split."""


@dataclass(frozen=True)
class Command:
    """One command line.

    Attributes:
        program: name of an installed command.
        groups: arguments; the words of a group are printed on one line.
        environment: additional environment variables.
        num_procs: number of processes that run it together, each with the variables of ``torchrun``.
    """

    program: str
    groups: tuple[tuple[str, ...], ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    num_procs: int = 1

    @property
    def arguments(self) -> list[str]:
        """All arguments, in order."""
        return [word for group in self.groups for word in group]

    def __str__(self) -> str:
        """Return the command for a shell, on several lines."""
        launch = [f"{name}={shlex.join([value])}" for name, value in self.environment.items()]
        begin, end = "", ""
        if self.num_procs > 1:
            launch += ["MASTER_ADDR=localhost MASTER_PORT=29500"]
            launch += [f"{name}={value}" for name, value in group_sizes(self.num_procs).items()]
            launch += ["RANK=$RANK LOCAL_RANK=$RANK"]
            begin, end = f"for RANK in {' '.join(map(str, range(self.num_procs)))}; do ", " & done; wait"
        lines = [begin + " ".join([*launch, self.program])]
        for words in (shlex.join(group) for group in self.groups if group):
            if len(lines) > 1 and len(lines[-1]) + len(words) < LINE_LENGTH:
                lines[-1] += " " + words
            else:
                lines.append("    " + words)
        return " \\\n".join(lines) + end

    def run(
        self,
        log: Path,
        files: Sequence[int] = (),
        watch: Callable[[Mapping[str, Any]], None] = lambda figures: None,
        further: Sequence[str] = (),
    ) -> Any:
        """Run it and return the value of its function.

        Args:
            log: file to which the command line and all output are appended.
            files: descriptors that it keeps open.
            watch: function that receives the figures that a training logs.
            further: arguments that stock commands do not know.

        Raises:
            AlmaError: it failed; the message has the reason and the log.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "a", encoding="utf-8", errors="backslashreplace") as file:
            print(f"$ {self}", file=file)
        words = [self.program, *self.arguments, *further]
        how: dict[str, Any] = {"environment": self.environment, "num_procs": self.num_procs, "files": files}
        return call(FUNCTIONS[self.program], words=words, log=log, watch=watch, **how)
