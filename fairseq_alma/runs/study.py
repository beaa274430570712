"""The options of ``alma-stream`` that are its own: each is declared here once, whoever asks for it.

What run.json names, and what binds a run to it, follows from the declarations; see `fairseq_alma.options`.
"""

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Mapping, Optional

from fairseq_alma.files import MAX_MEGABATCHES
from fairseq_alma.learners.learner import MAX_SEED
from fairseq_alma.learners.presets import PRESETS, Preset
from fairseq_alma.options import SUPPRESS, Options, of_this_call, opt, options_of, utf8_path, whole
from fairseq_alma.runs.slurm_jobs import read_parameters
from fairseq_alma.watch.curve_options import CURVE_OPTIONS

TEXT, IMAGES = ("text",), ("images",)
MEMBERS_ALONE = "trains_members_alone"
PROCESSES = whole(1, 1024)
FEATURES_FROM = "--features-from"
LEARNERS_FROM = "--learners-from"  # not --user-dir: fairseq's parser looks for that in the command line of any process


@dataclass(frozen=True, kw_only=True)
class StudyOptions(Options):
    """What makes a run: its data, its schedule, what it keeps, and what holds for each of its trainings."""

    stream: Path = of_this_call(
        MISSING, "the stream, written by alma-prep-text or alma-prep-images", parse=utf8_path, metavar="DIR"
    )
    run: Path = of_this_call(MISSING, "folder of this run; made if it is not there", parse=utf8_path, metavar="DIR")
    wait: int = opt(1, "mega-batches gathered before an update", range=whole(1), metavar="W")
    replay: bool = opt(False, "train on all mega-batches so far, not on the new ones alone")
    drop_rest: bool = opt(False, "leave the last mega-batches where fewer than W are left")
    iid: Optional[int] = opt(
        None,
        "instead of a stream: one stage on the shuffled union of the first K mega-batches, with K times --max-update "
        "and --total-num-update, to compare with K stages of one mega-batch each",
        range=whole(1),
        trait="has_iid_control",
        metavar="K",
    )
    finetune_from_model: Optional[Path] = opt(
        None,
        "begin with the weights of this checkpoint where a stage would begin with random ones: the first stage, and "
        "with --init scratch each; after the -- stand the options of its architecture, which alma-import prints "
        "(default: random weights)",
        kinds=TEXT,
        parse=utf8_path,
        metavar="CKPT",
    )
    then_evaluate: Optional[str] = opt(
        None,
        "run this shell command after each stage's test; its last line must be a JSON object of figures, such as "
        '{"bits_per_byte": 2.01}, which stage.json and the report have beside the test; in the command {checkpoint} '
        "stands for what was tested, {export} for that as alma-export writes it, removed afterwards; also {stage}, "
        "{arrival}, {run} and {stream}",
        free=True,
        metavar="COMMAND",
    )
    seeds: tuple[int, ...] = of_this_call(
        (1,),
        f"0 to {MAX_SEED:,} (default: 1); images: several are trained side by side by some learners, faster than one "
        "after the other, each as a run of its own, RUN/seed-N",
        range=whole(0, MAX_SEED),
        flag="--seed",
    )
    preset: Optional[Preset] = of_this_call(
        None,
        "fill in what is not given here and after the --: "
        + "; ".join(f"{preset.name}, {preset.help}" for preset in PRESETS.values()),
        choices=tuple(PRESETS),
        kinds=IMAGES,
        parse=PRESETS.__getitem__,
    )
    save_every: int = opt(
        500,
        "updates between two checkpoints within a stage: what a kill can cost (default: 500); images are saved every "
        "20 seconds",
        range=whole(1),
        kinds=TEXT,
        free=True,
    )
    keep_checkpoints: bool = opt(
        False,
        "keep all, and of mixtures on images which expert test images go to after each stage; default: only what a "
        "later stage and the report need",
        free=True,
    )
    validate: bool = opt(
        False, "let fairseq-train validate whenever it saves; for its log alone", kinds=TEXT, free=True
    )
    matrix: Optional[bool] = opt(
        None,
        "after each stage, test the held-out slice of every mega-batch (alma-prep-text --holdout-words) and as much of "
        "what it trains on; alma-report tells what is memorised and what is forgotten",
        kinds=TEXT,
        free=True,
    )
    features_from: Optional[str] = of_this_call(
        None,
        "a folder or file of Python that registers further features of a training, with their options; imported first",
        metavar="PATH",
    )
    learners_from: Optional[str] = of_this_call(
        None,
        "a folder or file of Python that registers further learners; imported first",
        flag=LEARNERS_FROM,
        metavar="PATH",
    )


@dataclass(frozen=True, kw_only=True)
class PartOptions(Options):
    """What runs a part of it, or nothing."""

    stage: Optional[int] = of_this_call(None, "run this stage alone, from 0; the one before must be complete")
    dry_run: bool = of_this_call(False, "print the commands of each stage and run nothing")
    megabatches: Optional[int] = of_this_call(
        None,
        "what the stream must have at least; with it, a dry run needs no stream (default: any number)",
        range=whole(1, MAX_MEGABATCHES),
        metavar="B",
    )


@dataclass(frozen=True, kw_only=True)
class ProcessOptions(Options):
    """What spreads it over processes, devices and jobs of a cluster."""

    num_procs: int = of_this_call(
        1,
        "processes that train a model together, on a GPU each or with --cpu; they share the batches of an update "
        "(--update-freq, a multiple of N), so N changes no figure but by rounding, and the resumed run may have "
        "another (default: 1)",
        range=PROCESSES,
        kinds=TEXT,
    )
    jobs: Optional[int] = of_this_call(
        None,
        "{learners}: train members in N processes at the same time, on --num-procs GPUs each where there are GPUs; any "
        "N gives the same files (images: the same for any N, also 1; without it all members are trained side by side "
        "in one network, equal but for rounding)",
        range=PROCESSES,
        trait=MEMBERS_ALONE,
    )
    side_by_side: Optional[int] = of_this_call(
        None,
        "with --jobs or --member, train K members in one network, 0 to K-1, K to 2K-1, ..., which is faster on a CPU; "
        "any --jobs gives the same files, another K other last digits (default: 1)",
        range=PROCESSES,
        kinds=IMAGES,
        trait=MEMBERS_ALONE,
        metavar="K",
    )
    member: Optional[tuple[int, ...]] = of_this_call(
        None,
        "{learners}: train these members, from 0, in --stage or in all stages; several calls may run at the same time; "
        "a call without --member (images: with --jobs) completes the stages",
        trait=MEMBERS_ALONE,
        metavar="I",
    )
    nodes: int = of_this_call(
        1,
        "nodes of a cluster that --num-procs are dealt to, by srun; with --slurm, or within an allocation (default: 1)",
        range=whole(1, 1024),
        kinds=TEXT,
        metavar="K",
    )
    slurm: Optional[Mapping[str, str]] = of_this_call(
        None,
        "queue a SLURM job for each stage, and for each member of a stage, with these options of sbatch (partition=gpu "
        "gpus-per-node=8 time=MINUTES ...; default: time=1440); each waits for what it starts from and resumes when it "
        "is queued again; --dry-run prints the scripts; needs pip install 'fairseq-alma[slurm]'",
        parse_all=read_parameters,
        metavar="OPTION=VALUE",
    )
    progress_to: Optional[int] = of_this_call(  # file descriptor, given by --jobs to the calls that it starts
        None, SUPPRESS, trait=MEMBERS_ALONE, metavar="FD"
    )


FREE_OPTIONS = (
    *(name for name, option in options_of(StudyOptions).items() if option.free),
    "--log-interval",
    *CURVE_OPTIONS,
)
"""What run.json names and does not bind a run to: it changes what is kept and shown, not what comes out."""
