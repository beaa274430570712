"""Check the options of alma-stream after ``--``, and select the options for fairseq-eval-lm.

This module does not use the parser of fairseq, which takes seconds to import. fairseq-train checks all options again.
"""

from copy import copy
from typing import Mapping, Optional, Sequence

from fairseq_alma.checkpoints.model_options import MODELS
from fairseq_alma.options import GivenOption, group_words, options_of
from fairseq_alma.training.feature import FEATURES

BALANCING = "alma_switch_cross_entropy"
"""Name of the criterion that adds the load-balancing loss of Switch layers."""
_OWNED = {
    "alma-stream sets this option": "user-dir task",
    "give this option before the --": "wait replay seed",
    "give --run before the --": "save-dir",
    "give this option, or --init, before the --": "finetune-from-model",
    "alma-stream resumes from the last checkpoint of the stage": "restore-file continue-once",
    "alma-stream sets the mega-batches of a stage": "megabatch train-subset",
    "sequences begin with </s>, and the target is the next token": "add-bos-token future-target past-target "
    "self-target",
    "training uses all tokens of a document, and splits documents at --tokens-per-sample": "shorten-method",
    "a stage starts with a new optimizer unless --carry-optimizer is given before the --": "reset-optimizer "
    "reset-lr-scheduler reset-meters reset-dataloader",
    "alma-stream writes the logs to RUN/stage-NNN": "log-format log-file no-progress-bar",
    "give --save-every before the --": "save-interval save-interval-updates save-interval-minutes no-epoch-checkpoints",
    "give --keep-checkpoints before the --": "keep-interval-updates keep-interval-updates-pattern keep-last-epochs",
    "give --best-checkpoint before the --": "keep-best-checkpoints",
    "a stage starts or resumes from the last checkpoint": "no-save no-last-checkpoints no-save-optimizer-state "
    "write-checkpoints-asynchronously checkpoint-suffix",
    "each epoch uses all sequences": "skip-remainder-batch",
    "the order of the sequences must not change when a stage resumes": "update-ordered-indices-seed",
    "validation is disabled by default; give --validate before the -- to enable validation": "disable-validation",
    "only --max-update or --max-epoch ends a stage": "patience stop-time-hours stop-min-lr",
}
OWNED = {f"--{name}": instead for instead, names in _OWNED.items() for name in names.split()}
"""Option of fairseq-train that is not allowed after ``--`` -> explanation for the error message."""
# fairseq-eval-lm gets no --autocast: tests use fp32, so that the perplexity does not depend on the batch size.
EVAL_OPTIONS = {
    **{name: (name,) for name in ("--cpu", "--tokens-per-sample", "--sample-break-mode", "--num-workers")},
    "--batch-size": ("--batch-size-valid", "--batch-size"),
    "--max-tokens": ("--max-tokens-valid", "--max-tokens"),
}
"""Option of fairseq-eval-lm -> options of fairseq-train that can provide the value, in order of precedence."""
BATCHES_PER_UPDATE = "--update-freq"
LENGTHS = ("--max-update", "--total-num-update")
"""Options whose value is a number of updates; ``--iid K`` multiplies these values by K."""


class TrainOptions:
    """Options after ``--`` for fairseq-train, in the order given.

    Args:
        words: arguments after ``--``.
        owned: further options that are not allowed, because the learner sets them -> explanation, as in `OWNED`.

    Raises:
        ValueError: an option is not allowed, missing, or out of range.
    """

    def __init__(self, words: Sequence[str], owned: Mapping[str, str] = {}) -> None:
        self.owned = dict(OWNED)
        for kind in FEATURES:
            own = [
                option.flag for option in options_of(kind).values() if option.side is None and "text" in option.kinds
            ]
            self.owned |= dict.fromkeys(own, "give this option before the --") | dict(kind.owned)
        self.owned |= owned
        self.options = group_words(words)
        for name, _ in self.options:
            for each, instead in self.owned.items():
                is_abbreviation = len(name) > 4 and each.startswith(name) and name not in self.owned
                if name == each or is_abbreviation:
                    raise ValueError(f"{name} is not allowed after --: {instead}")
        if self.last("--arch") is None:
            raise ValueError("--arch: not given after --; give an architecture, such as --arch alma_switch_lm_tiny")
        options = [option for kind in (*MODELS, *FEATURES) for option in options_of(kind).values()]
        declared = {each.flag: each for each in options if "text" in each.kinds and each.type is not bool}
        for name, values in self.options:
            if name in declared:
                declared[name].value(" ".join(values))
        self.max_update = self._positive("--max-update")
        self.max_epoch = self._positive("--max-epoch")
        if self.max_update is None and self.max_epoch is None:
            raise ValueError("--max-update: not given after --; give --max-update or --max-epoch after --")
        if self.last("--balance-loss-weight") is not None and self.last("--criterion") != (BALANCING,):
            raise ValueError(f"--balance-loss-weight after --: requires --criterion {BALANCING}; give both after --")

    def last(self, name: str) -> Optional[tuple[str, ...]]:
        """Return the values of the last occurrence of an option; None if the option is not given."""
        found = [values for option, values in self.options if option == name]
        return found[-1] if found else None

    def as_dict(self) -> dict[str, str]:
        """Return the last value of each option by name, for run.json; the value of a flag is an empty string."""
        return {name: " ".join(values) for name, values in self.options}

    def for_evaluation(self) -> list[tuple[str, ...]]:
        """Return the options for fairseq-eval-lm, each as (name, value) or, for a flag, (name,)."""
        found = []
        for name, sources in EVAL_OPTIONS.items():
            given = [values for source in sources if (values := self.last(source)) is not None]
            found += [(name, *given[0])] if given else []
        return found

    def lengthened(self, times: int) -> "TrainOptions":
        """Return a copy in which the options in `LENGTHS` (numbers of updates) are multiplied by ``times``."""
        longer = copy(self)
        longer.options = [
            (name, (str(times * (self._positive(name) or 0)),) if name in LENGTHS else values)
            for name, values in self.options
        ]
        longer.max_update = longer._positive("--max-update")
        return longer

    def shared(self, num_procs: int) -> "TrainOptions":
        """Return a copy for one process of ``num_procs``, with the batches per update divided by ``num_procs``.

        Raises:
            ValueError: the number of batches per update is not a multiple of the number of processes.
        """
        (words,) = self.last(BATCHES_PER_UPDATE) or ("1",)
        counts = [int(word) if word.isdecimal() else 0 for word in words.split(",")]
        if any(count == 0 or count % num_procs for count in counts):
            raise ValueError(
                f"--num-procs {num_procs}: must divide the number of batches per update, found {BATCHES_PER_UPDATE} "
                f"{words} (after --); set {BATCHES_PER_UPDATE} to a multiple of {num_procs}"
            )
        each = ",".join(str(count // num_procs) for count in counts)
        shared = copy(self)
        shared.options = replace_option(self.options, BATCHES_PER_UPDATE, each)
        return shared

    def _positive(self, name: str) -> Optional[int]:
        values = self.last(name)
        if values is None:
            return None
        if len(values) != 1 or not values[0].isdecimal() or int(values[0]) < 1:
            raise ValueError(f"{name} {' '.join(values)} after --: must be a positive integer")
        return int(values[0])


def replace_option(options: Sequence[GivenOption], name: str, value: str) -> list[GivenOption]:
    """Return the options, with ``value`` as the value of each occurrence of the option ``name``."""
    return [(each, (value,)) if each == name else (each, values) for each, values in options]
