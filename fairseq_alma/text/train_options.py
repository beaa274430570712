"""Complete and check the options after ``--``, which are options of fairseq-train. No torch or fairseq imports.

`complete` chooses the default model, optimizer and training length of a run from one table. Options of the user take
precedence. For ``--arch alma_switch_lm``, an option gets a default only if fairseq's default is missing or not useful,
such as ``--lr`` 0.25. ``docs/reference/defaults.md`` has the measurements behind the table.
`TrainOptions` checks the options, and selects options for fairseq-eval-lm. fairseq-train checks all options again.
"""

import contextlib
import math
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Mapping, NamedTuple, Optional, Sequence

from fairseq_alma.checkpoints.model_options import (
    ALMA_TRANSFORMER,
    LANGUAGE,
    SWITCH_SIZES,
    TRANSFORMER_SIZES,
    USUAL_FREQUENCY,
    AlmaTransformerOptions,
    LengthOptions,
)
from fairseq_alma.data.tokens import NUM_FAIRSEQ_SYMBOLS
from fairseq_alma.errors import AlmaError
from fairseq_alma.options import GivenOption, given_values, group_words, options_of
from fairseq_alma.training.feature import ENDLESS, FEATURES

# Name of the criterion that adds the load-balancing loss of Switch layers.
BALANCING = "alma_switch_cross_entropy"


class Row(NamedTuple):
    """Default model and optimizer for runs with up to ``tokens`` training tokens.

    Attributes:
        tokens: maximum number of training tokens of a run, summed over all passes.
        width: model dimension; `usual_heads` gives the number of heads.
        layers: number of layers.
        length: tokens per sequence.
        batch: sequences per update.
        rate: learning rate of Muon for weight matrices. The learning rate of Adam is 1.5 times this rate for input
            embeddings, and 0.15 times this rate for other parameters (defaults of ``muon``).
    """

    tokens: float
    width: int
    layers: int
    length: int
    batch: int
    rate: float


# Defaults by number of training tokens, in ascending order. With ``--size``, it sets only the tokens per update.
TABLE = (
    Row(0.2e6, 48, 2, 128, 4, 0.03),
    Row(0.8e6, 64, 2, 128, 8, 0.03),
    Row(2.5e6, 96, 2, 128, 8, 0.03),
    Row(8e6, 128, 2, 128, 8, 0.03),
    Row(12e6, 144, 4, 256, 4, 0.02),
    Row(25e6, 192, 4, 256, 8, 0.02),
    Row(80e6, 256, 4, 256, 16, 0.02),
    Row(250e6, 384, 6, 256, 32, 0.02),
    Row(1e9, 512, 8, 512, 64, 0.02),
    Row(5e9, 768, 12, 512, 128, 0.015),
    Row(math.inf, 1024, 16, 512, 256, 0.01),
)
# Default maximum number of tokens per batch. An update with more tokens has several batches (``--update-freq``).
MAX_BATCH_TOKENS = 8192
MANY_PASSES = 4  # Maximum number of passes of a run that has no dropout by default.
# Default weight decay of runs with more than one and at most `MANY_PASSES` passes, except in a model's first stage.
WEIGHT_DECAY = 0.01
# First stage of a new model: weight decay times learning rate times updates, and maximum weight decay.
FIRST_DECAY, MAX_DECAY = 0.5, 0.15
START_FACTOR = 0.1  # Factor of the default learning rate in a run that starts from a trained model.
# Options of ``--preset paper`` (paper v5, appendix A); ``recipes/lm`` cites the source of each value.
PAPER = {
    "--arch": "alma_switch_lm_base",
    "--num-experts": "4",
    "--dropout": "0.1",
    "--tokens-per-sample": "512",
    "--criterion": BALANCING,
    "--optimizer": "adam",
    "--adam-betas": "(0.9, 0.98)",
    "--adam-eps": "1e-8",
    "--lr": "0.001",
    "--lr-scheduler": "polynomial_decay",
    "--batch-size": "8",
    "--update-freq": "24",
}
# Options with a default for ``--arch alma_switch_lm``. Option -> dependent options, which get a
# default only if this option gets its default.
OTHER_ARCH = {"--criterion": (), "--optimizer": ("adam-betas", "adam-eps", "weight-decay", "clip-norm"),
             "--lr": ("lr-scheduler", "warmup-updates", "total-num-update"), "--batch-size": ("update-freq",),
             "--max-update": ()}  # fmt: skip
# Options that change the number of parameters in a way that `num_params` does not consider.
SIZE_OPTIONS = {each.flag for each in options_of(AlmaTransformerOptions).values() if each.shape} - {"--decoder-layers"}
END_OPTIONS = ("--max-update", "--max-epoch")
# Option with a default -> options that, if given, disable this default.
ALTERNATIVES = {"--batch-size": ("--batch-size", "--max-tokens"), "--max-update": END_OPTIONS}
_OWNED = {
    "alma-stream sets this option": "user-dir task",
    "give this option before the --": "wait replay seed",
    "give --run before the --": "save-dir",
    "give --num-procs before the --": "distributed-world-size",
    "give this option, or --init, before the --": "finetune-from-model",
    "alma-stream resumes from the last checkpoint of the stage": "restore-file continue-once",
    "alma-stream sets the mega-batches of a stage": "megabatch train-subset",
    "sequences begin with </s>, and the target is the next token": "add-bos-token future-target past-target "
    "self-target",
    "training uses all tokens of a document, and splits documents at --tokens-per-sample": "shorten-method "
    "sample-break-mode",
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
    "give --autocast bf16, or use fp32": "fp16 bf16 amp tpu memory-efficient-fp16 memory-efficient-bf16",
}
# Option of fairseq-train that is not allowed after ``--`` -> explanation for the error message.
OWNED = {f"--{name}": instead for instead, names in _OWNED.items() for name in names.split()}
# Option of fairseq-eval-lm -> options of fairseq-train that can provide the value, in order of precedence.
# There is no --autocast: tests use fp32, so that the perplexity does not depend on the batch size.
EVAL_OPTIONS = {
    **{name: (name,) for name in ("--cpu", "--tokens-per-sample", "--num-workers")},
    "--batch-size": ("--batch-size-valid", "--batch-size"),
    "--max-tokens": ("--max-tokens-valid", "--max-tokens"),
}
# Options whose value is a number of updates; ``--iid K`` multiplies these values by K.
UPDATE_COUNTS = ("--max-update", "--total-num-update")


@dataclass(frozen=True)
class Context:
    """Options of alma-stream and properties of a run that change the defaults.

    Attributes:
        size: number of model parameters; None: the number of training tokens determines the size.
        passes: number of passes through the text of each stage; None: 1, unless an option after ``--`` sets the length.
        is_paper: whether ``--preset paper`` is given.
        owned: option of fairseq-train that the learner sets -> explanation for the error if the user gives the option.
        sizes: options that the learner sets in the first stage, such as ``--num-experts`` -> value.
        continues: whether a later stage starts from the weights of an earlier stage.
        features: value of each option of a training feature, by field name; None: the option is not given.
        selects_weights: whether the user selects the weights to test, for example with ``--best-checkpoint``.
        has_start: whether the run starts from a checkpoint.
        num_procs: number of processes that share the batches of an update.
    """

    size: Optional[int] = None
    passes: Optional[float] = None
    is_paper: bool = False
    owned: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)
    continues: bool = True
    features: Mapping[str, Any] = field(default_factory=dict)
    selects_weights: bool = False
    has_start: bool = False
    num_procs: int = 1


@dataclass(frozen=True)
class Recipe:
    """Options of a run, including the defaults.

    Attributes:
        words: arguments after ``--``: first the defaults, then the arguments of the user.
        chosen: option after ``--`` that the user does not give -> default.
        features: field name of a feature option that the user does not give before ``--`` -> default.
        lengths: number of updates of each stage; None: an option after ``--`` sets the length, or there is no stream.
        per_update: number of tokens per update.
        record: entry ``recipe`` of run.json; None: the run uses no defaults.
        lines: printed description of the defaults.
    """

    words: list[str]
    chosen: Mapping[str, str] = field(default_factory=dict)
    features: Mapping[str, Any] = field(default_factory=dict)
    lengths: Optional[Sequence[int]] = None
    record: Optional[Mapping[str, Any]] = None
    lines: Sequence[str] = ()
    per_update: int = 0


def usual_ffn(width: int) -> int:
    """Return the default hidden dimension of the FFN for model dimension ``width``."""
    return max(8, 8 * width // 3 // 8 * 8)


def usual_heads(width: int, head_dim: Optional[int] = None) -> int:
    """Return the default number of attention heads for model dimension ``width``; this may not divide ``width``."""
    return max(1, width // head_dim) if head_dim else max(2, width // 64)


def complete_sizes(options: dict[str, Any], arch: str) -> None:
    """Replace each None in the options of ``alma_transformer_lm`` with the default value, in place.

    Raises:
        AlmaError: two options conflict.
    """

    def default(name: str, value: Any) -> Any:
        options[name] = value if options[name] is None else options[name]
        return options[name]

    layers, width = (default(f"decoder_{name}", size) for name, size in TRANSFORMER_SIZES[arch].items())
    default("decoder_ffn_embed_dim", usual_ffn(width))
    heads = default("decoder_attention_heads", usual_heads(width, options["head_dim"]))
    if options["head_dim"] is None and width % heads:
        raise AlmaError(
            f"--decoder-attention-heads {heads}: must divide --decoder-embed-dim {width}; give a divisor of {width}, "
            "or set --head-dim"
        )
    if default("head_dim", width // heads) % 2:
        raise AlmaError(
            f"--head-dim {options['head_dim']}: rotary embeddings need an even number; give an even --head-dim, or "
            "change --decoder-attention-heads"
        )
    kv_heads = default("num_kv_heads", heads)
    if heads % kv_heads:
        raise AlmaError(f"--num-kv-heads {kv_heads}: must divide the {heads} query heads; give a divisor of {heads}")
    every = default("moe_freq", USUAL_FREQUENCY)
    if default("num_experts", 1) > 1 and not 1 <= every <= layers:
        raise AlmaError(f"--moe-freq {every}: gives no Switch layer in {layers} layers; give 1 to {layers}")
    for name, value in (("rope_theta", 10000.0), ("norm_eps", 1e-6), ("gate_trees", ""), ("symbol_ids", "")):
        default(name, value)


def transformer_params(
    model_dim: int, ffn_dim: int, num_layers: int, heads: tuple[int, int, int], vocab_size: int,
    num_experts: Sequence[int] = (),
) -> int:  # fmt: skip
    """Return the number of parameters of an ``alma_transformer_lm`` with untied embeddings.

    Args:
        model_dim: embedding dimension.
        ffn_dim: hidden dimension of the feed-forward layers.
        num_layers: total number of dense layers and Switch layers.
        heads: (number of query heads, number of key-value heads, dimension of a head).
        vocab_size: vocabulary size, including the four special symbols of fairseq.
        num_experts: number of experts of each Switch layer; all gates are flat (one linear layer).
    """
    query_heads, kv_heads, head_dim = heads
    attention = model_dim * head_dim * 2 * (query_heads + kv_heads)
    layers = num_layers * (attention + 2 * model_dim + 2 * head_dim)
    num_ffns = num_layers - len(num_experts) + sum(num_experts)
    gates = sum(num_experts) * model_dim
    return 2 * vocab_size * model_dim + model_dim + layers + num_ffns * 3 * model_dim * ffn_dim + gates


def num_params(width: int, layers: int, vocab_size: int, num_experts: int = 1) -> int:
    """Return the number of parameters of an ``alma_transformer_lm``: dense, or with experts in every second layer."""
    heads = usual_heads(width)
    experts, sizes = (num_experts,) * (layers // 2) if num_experts > 1 else (), (heads, heads, width // heads)
    return transformer_params(width, usual_ffn(width), layers, sizes, vocab_size + NUM_FAIRSEQ_SYMBOLS, experts)


def row_of(tokens: float) -> Row:
    """Return the row of `TABLE` for a run with ``tokens`` training tokens."""
    return next(row for row in TABLE if tokens <= row.tokens)


def model_of(size: int, vocab_size: int, given: Mapping[str, str]) -> Row:
    """Return a `Row` for the model closest in size to ``size`` parameters.

    Args:
        size: number of parameters.
        vocab_size: vocabulary size of the tokenizer.
        given: options after ``--``; the size takes ``--num-experts`` and ``--decoder-layers`` into account.

    Raises:
        AlmaError: ``size`` is out of range, or ``--arch`` is given too.
    """
    if "--arch" in given:
        raise AlmaError("--size: not allowed with --arch after --, as both set the model; omit --size or --arch")
    experts, layers = _number(given, "--num-experts"), _number(given, "--decoder-layers", 0)
    possible = (*range(32, 512, 16), *range(512, 4097, 64))
    widths = [width for width in possible if width % usual_heads(width) == 0]
    models = [next((row for row in TABLE if row.width >= width), TABLE[-1])._replace(width=width) for width in widths]
    models = [row._replace(layers=layers or row.layers) for row in models]
    sizes = [num_params(row.width, row.layers, vocab_size, experts) for row in models]
    if not 0.5 * sizes[0] <= size <= 2 * sizes[-1]:
        raise AlmaError(
            f"--size {size:,}: expected {sizes[0]:,} to {sizes[-1]:,} parameters (vocabulary: {vocab_size:,} tokens); "
            "give a number in this range"
        )
    return models[min(range(len(sizes)), key=lambda index: abs(math.log(sizes[index] / size)))]


def complete(
    words: Sequence[str],
    context: Context,
    tokens: Optional[Sequence[int]],
    vocab_size: int = 0,
    before: Optional[Mapping[str, Any]] = None,
) -> Recipe:
    """Return the options of a run, including defaults. A resumed run keeps its defaults; only ``passes`` can change.

    Args:
        words: arguments after ``--``.
        context: options before ``--`` and properties of the run that change the defaults.
        tokens: number of tokens in the text of each stage; None: a dry run without a stream.
        vocab_size: vocabulary size of the stream's tokenizer.
        before: entry ``recipe`` of an existing run.json, with the previous defaults; None: a new run.

    Raises:
        ValueError: an option is missing, out of range, or contradicts another; the message begins with the option.
    """
    given = given_values(words)
    ends = [end for end in END_OPTIONS if end in given]
    _refuse_conflicts(given, ends, context)
    arch, size = given.get("--arch"), context.size
    is_other_arch = arch in SWITCH_SIZES
    sizes = {**given, **context.sizes}

    requested = {"size": size, "preset": "paper" if context.is_paper else None, "arch": arch}
    if before is not None:
        # The command that resumes a run may omit --size and --preset.
        omitted = {"size": None, "preset": None, "arch": before["preferences"]["arch"]}
        if requested in (before["preferences"], omitted):
            return _recipe(words, given, {**before, "passes": context.passes or before["passes"]}, context, tokens)

    is_partial = is_other_arch and not context.is_paper  # only options in OTHER_ARCH get a default
    if is_partial and ends and not _missing(_rows(TABLE[0], 1, given, context), given, context.owned, is_partial):
        return Recipe([*words])
    if tokens is None and not (arch is not None and ends):
        raise ValueError(
            "--dry-run without a stream: the defaults depend on the text; give --stream, or --arch and --max-update "
            "after --"
        )
    passes, stages = context.passes or 1.0, tokens or [10**6]
    row = row_of(passes * sum(stages))
    if size is not None:
        model = model_of(size, vocab_size, sizes)
        row = model._replace(batch=max(1, row.batch * row.length // model.length))
    rows = dict(PAPER) if context.is_paper else _rows(row, passes, given, context)
    filled = {**_missing(rows, given, context.owned, is_partial), **given}
    updates = _number(given, "--max-update", max(1, round(passes * stages[0] / tokens_per_update(filled))))
    warmup = max(1, min(max(50, updates // 50), updates // 4))
    rows |= {"--warmup-updates": str(warmup), "--max-update": str(updates)}
    if filled.get("--lr-scheduler") == "polynomial_decay" and "--total-num-update" not in given:
        if ends == ["--max-epoch"]:
            raise ValueError(
                "--max-epoch after --: --lr-scheduler polynomial_decay needs a number of updates; give --passes before "
                "the -- instead, or --total-num-update after --"
            )
        rows["--total-num-update"] = str(updates)
    chosen = _missing(rows, given, context.owned, is_partial)
    filled = {**chosen, **given}

    features: dict[str, Any] = {}
    if not is_other_arch and not context.is_paper:
        by_epoch = {"--max-epoch", "--force-anneal"} & filled.keys() or "," in filled.get("--lr", "")
        is_endless = filled.get("--lr-scheduler") in ENDLESS and not by_epoch
        features |= {} if context.selects_weights else {"ema_half_life": "1/8"}
        continues = context.continues and not context.features.get("best_checkpoint")
        features |= {"carry_optimizer": True} if continues and is_endless else {}
    line = f"model: {filled['--arch']}"
    if "--decoder-embed-dim" in chosen:
        experts, layers = _number(sizes, "--num-experts"), _number(sizes, "--decoder-layers", row.layers)
        if not SIZE_OPTIONS & given.keys():
            line += f", {num_params(row.width, layers, vocab_size, experts):,} parameters"
        line += f": width {row.width}, {layers} layers, {'dense' if experts == 1 else f'{experts} experts'}"
    elif size is not None:
        line += f": --decoder-embed-dim {given['--decoder-embed-dim']} after -- overrides --size"
    record = {"preferences": requested, "passes": passes, "chosen": chosen, "features": features, "lines": [line]}
    return _recipe(words, given, record, context, tokens)


def _refuse_conflicts(given: Mapping[str, str], ends: Sequence[str], context: Context) -> None:
    if given.get("--arch", "alma_transformer_lm") not in {*TRANSFORMER_SIZES, *SWITCH_SIZES}:
        raise ValueError(
            f"--arch {given['--arch']} after --: expected an architecture of this package, such as alma_transformer_lm "
            "or alma_switch_lm_base; give one of them, or train with fairseq-train"
        )
    if context.size is not None and (context.has_start or context.is_paper):
        source = "--finetune-from-model, whose checkpoint" if context.has_start else "--preset paper, which"
        raise ValueError(f"--size: not allowed with {source} sets the model; omit --size")
    if context.passes is not None and ends:
        names = " and ".join(ends)
        raise ValueError(f"--passes: not allowed with {names} after --; omit --passes or {names}")


def _rows(row: Row, passes: float, given: Mapping[str, str], context: Context) -> dict[str, str]:
    arch = given.get("--arch", "alma_transformer_lm")
    procs = 1 if "--update-freq" in given else context.num_procs  # the processes share the given batches
    steps = procs * math.ceil(row.batch * row.length / (MAX_BATCH_TOKENS * procs))
    many = passes > MANY_PASSES
    repeats = passes > 1 and arch in TRANSFORMER_SIZES
    is_new = not context.has_start and "--arch" not in given
    if arch in TRANSFORMER_SIZES:
        rate = row.rate if given.get("--optimizer", "muon") == "muon" else row.rate / 2  # half the rate with Adam
        optimizer = {"--optimizer": "muon", "--lr": rate * (START_FACTOR if context.has_start else 1)}
    else:
        width = given.get("--decoder-embed-dim", str(SWITCH_SIZES[arch]["embed_dim"]))
        rate = 0.9 / (int(width) if width.isdecimal() else 512)
        optimizer = {"--optimizer": "adam", "--lr": f"{rate:.3g}", "--adam-betas": "(0.9, 0.98)", "--adam-eps": "1e-8"}
    rows: dict[str, Any] = {
        "--arch": arch,
        **({"--decoder-embed-dim": row.width, "--decoder-layers": row.layers} if is_new else {}),
        "--dropout": 0.1 if many else 0,
        "--tokens-per-sample": row.length,
        "--num-workers": 0,
        "--criterion": BALANCING,
        "--lr-scheduler": "fixed",
        "--batch-size": max(1, row.batch // steps),
        "--clip-norm": 1,
        "--weight-decay": 0.1 if many else WEIGHT_DECAY if repeats else 0,
        **({"--update-freq": steps} if steps > 1 else {}),
        **optimizer,
    }
    return {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in rows.items()}


def _missing(
    rows: Mapping[str, str], given: Mapping[str, str], owned: Mapping[str, str], is_partial: bool
) -> dict[str, str]:
    """Return the defaults of options that neither the user nor the learner sets; ``is_partial``: see `OTHER_ARCH`."""
    missing = [name for name in rows if not any(each in given for each in ALTERNATIVES.get(name, (name,)))]
    if is_partial:
        groups = [(flag, *(f"--{name}" for name in others)) for flag, others in OTHER_ARCH.items() if flag in missing]
        missing = [name for group in groups for name in group if name in missing]
    return {name: rows[name] for name in missing if name not in owned}


def _number(given: Mapping[str, str], name: str, default: int = 1) -> int:
    """Return the value of an option, at least 1; ``default`` if it is missing or not an integer."""
    word = given.get(name, "").partition(",")[0]  # --update-freq 2,4: a value for each epoch
    return max(1, int(word)) if word.isdecimal() else default


def first_decay(rate: str, num_updates: Optional[int]) -> float:
    """Return the weight decay of a new model's first stage in a run that reads each text several times.

    The time constant of the decay, 1 / (rate * decay) updates, is a fixed share of the stage, as in Wang & Aitchison
    (2024, arXiv:2405.13698), so that a model does not memorize a small first text. `WEIGHT_DECAY` is the minimum.
    """
    with contextlib.suppress(ValueError, ZeroDivisionError):  # a list of rates; --lr 0
        return max(WEIGHT_DECAY, min(MAX_DECAY, FIRST_DECAY / (float(rate) * (num_updates or 0))))
    return WEIGHT_DECAY


def tokens_per_update(filled: Mapping[str, str]) -> int:
    """Return the tokens per update. Missing or invalid options count as 1, and ``--tokens-per-sample`` as 512."""
    length = _number(filled, "--tokens-per-sample", 512)
    limits = {
        "--max-tokens": max(1, _number(filled, "--max-tokens") // length),
        "--batch-size": _number(filled, "--batch-size"),
    }
    return (
        _number(filled, "--update-freq") * length * min((limits[name] for name in limits if name in filled), default=1)
    )


def _recipe(
    words: Sequence[str],
    given: Mapping[str, str],
    record: Mapping[str, Any],
    context: Context,
    tokens: Optional[Sequence[int]],
) -> Recipe:
    """Return the `Recipe` for the defaults in ``record``; options that the user gives replace these defaults."""
    chosen = {name: value for name, value in record["chosen"].items() if name not in given}
    features = {name: value for name, value in record["features"].items() if context.features.get(name) is None}
    passes = record["passes"] if "--max-update" in chosen else None
    all_words = [*(word for option in chosen.items() for word in option), *words]
    filled = given_values(all_words)
    if (arch := filled.get("--arch")) in TRANSFORMER_SIZES and not context.has_start:  # a checkpoint has its own sizes
        sizes = {**filled, **context.sizes}
        shape = {name: each for kind in ALMA_TRANSFORMER for name, each in options_of(kind).items() if each.shape}
        values = {name: each.value(sizes[each.flag]) if each.flag in sizes else None for name, each in shape.items()}
        complete_sizes(values, arch)
    lines, lengths, per_update = [*record["lines"][:1]], None, tokens_per_update(filled)
    if passes is not None:
        if len({*filled.get("--update-freq", "1").split(",")}) > 1:
            raise ValueError(f"--update-freq {filled['--update-freq']} after --: give one value, or give --max-update")
        lines.append(f"length: {passes:g} pass{'' if passes == 1 else 'es'}, {per_update:,} tokens per update")
        lengths = None if tokens is None else [max(1, round(passes * count / per_update)) for count in tokens]
    lines.append(
        f"optimizer: {filled.get('--optimizer')}, --lr {filled.get('--lr')}, {filled.get('--warmup-updates', 0)} "
        f"warm-up updates, then --lr-scheduler {filled.get('--lr-scheduler', 'fixed')}"
    )
    if "ema_half_life" in features:
        lines.append(f"tested weights: moving average, half-life {features['ema_half_life']} of the updates so far")
    return Recipe(all_words, chosen, features, lengths, {**record, "lines": lines}, lines, per_update)


class OwnedOptionError(ValueError):
    """Error for an option that is not allowed after ``--``; ``instead`` is the explanation, as in `OWNED`."""

    def __init__(self, name: str, instead: str) -> None:
        super().__init__(f"{name} is not allowed after --: {instead}")
        self.name, self.instead = name, instead


class TrainOptions:
    """Options after ``--`` for fairseq-train, in the order given.

    Args:
        words: arguments after ``--``.
        owned: further options that are not allowed, because the learner sets them -> explanation, as in `OWNED`.

    Raises:
        ValueError: an option is not allowed, missing, or out of range.
    """

    def __init__(self, words: Sequence[str], owned: Mapping[str, str] = {}) -> None:
        refused = {**OWNED, "--": "give -- once"}
        for kind in FEATURES:
            own = [each.flag for each in options_of(kind).values() if each.side is None and "text" in each.kinds]
            refused |= dict.fromkeys(own, "give this option before the --") | dict(kind.owned)
        refused |= owned
        self.options = group_words(words)
        for name, _ in self.options:
            for each, instead in refused.items():
                is_abbreviation = len(name) > 4 and each.startswith(name) and name not in refused
                if name == each or is_abbreviation:
                    raise OwnedOptionError(name, instead)
        kinds = (*LANGUAGE, AlmaTransformerOptions, LengthOptions, *FEATURES)
        options = [option for kind in kinds for option in options_of(kind).values()]
        declared = {each.flag: each for each in options if "text" in each.kinds and each.type is not bool}
        known = {*declared, *PAPER, *EVAL_OPTIONS, *END_OPTIONS, "--clip-norm", "--warmup-updates", "--weight-decay"}
        for name, values in self.options:
            if name in declared:
                declared[name].value(" ".join(values))
            for each in sorted(known):  # fairseq would accept an abbreviation, but the defaults and the tests would not
                if each.startswith(name) and name not in known and len(name) > 4:
                    raise ValueError(f"{name} after --: abbreviation of {each}; give the full name")
        self.max_update = self._positive("--max-update")
        self.max_epoch = self._positive("--max-epoch")
        if self.max_update is None and self.max_epoch is None:
            raise ValueError("--max-update: not given after --; give --max-update or --max-epoch after --")
        if self.last("--balance-loss-weight") is not None and self.last("--criterion") != (BALANCING,):
            raise ValueError(f"--balance-loss-weight after --: requires --criterion {BALANCING}; give both after --")

    def last(self, name: str) -> Optional[tuple[str, ...]]:
        """Return the values of the last occurrence of an option; None if the option is not given."""
        return next((values for option, values in reversed(self.options) if option == name), None)

    def for_evaluation(self) -> list[tuple[str, ...]]:
        """Return the options for fairseq-eval-lm, each as (name, value) or, for a flag, (name,)."""
        found = []
        for name, sources in EVAL_OPTIONS.items():
            given = [values for source in sources if (values := self.last(source)) is not None]
            found += [(name, *given[0])] if given else []
        return found

    def lengthened(self, times: int) -> "TrainOptions":
        """Return a copy in which the options in `UPDATE_COUNTS` (numbers of updates) are multiplied by ``times``."""
        longer = copy(self)
        for name in UPDATE_COUNTS:
            longer.options = replace_option(longer.options, name, str(times * (self._positive(name) or 0)))
        longer.max_update = longer._positive("--max-update")
        return longer

    def shared(self, num_procs: int) -> "TrainOptions":
        """Return a copy for one process of ``num_procs``, with the batches per update divided by ``num_procs``.

        Raises:
            ValueError: the number of batches per update is not a multiple of the number of processes.
        """
        (words,) = self.last("--update-freq") or ("1",)
        counts = [int(word) if word.isdecimal() else 0 for word in words.split(",")]
        if any(count == 0 or count % num_procs for count in counts):
            raise ValueError(
                f"--num-procs {num_procs}: must divide the number of batches per update, found --update-freq "
                f"{words} (after --); set --update-freq to a multiple of {num_procs}"
            )
        each = ",".join(str(count // num_procs) for count in counts)
        shared = copy(self)
        shared.options = replace_option(self.options, "--update-freq", each)
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
