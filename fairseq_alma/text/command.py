"""Print fairseq and alma commands for ``--dry-run``, or run the commands in the helper process."""

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
"""Command -> function that the command calls, as ``module:name``."""


@dataclass(frozen=True)
class Command:
    """A command line.

    Attributes:
        program: name of an installed command.
        groups: arguments in groups; all arguments of a group are printed on the same line.
        environment: additional environment variables.
        num_procs: number of distributed processes, each with the environment variables of ``torchrun``.
    """

    program: str
    groups: tuple[tuple[str, ...], ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    num_procs: int = 1

    @property
    def arguments(self) -> list[str]:
        return [word for group in self.groups for word in group]

    def __str__(self) -> str:
        """Return the command line for a shell, split into lines."""
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
        """Run the command in the helper process, and return the result of its function in `FUNCTIONS`.

        Args:
            log: file to which the command line and all output are appended.
            files: file descriptors that the command keeps open.
            watch: function that receives the metrics of each logged update.
            further: additional arguments that are omitted from the command line in the log.

        Raises:
            AlmaError: the command failed; the message names the reason and the log file.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "a", encoding="utf-8", errors="backslashreplace") as file:
            print(f"$ {self}", file=file)
        words = [self.program, *self.arguments, *further]
        how: dict[str, Any] = {"environment": self.environment, "num_procs": self.num_procs, "files": files}
        return call(FUNCTIONS[self.program], words=words, log=log, watch=watch, **how)
