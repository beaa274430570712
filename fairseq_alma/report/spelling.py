"""How a report spells runs, learners, sizes and numbers, and what it says of tables and figures; quick to import.

The sentences stand in ``sentences.toml``.
"""

import functools
import math
import tomllib
from importlib import resources
from typing import Any, Mapping, Optional

from fairseq_alma.checkpoints.model_options import NETWORK
from fairseq_alma.errors import printable
from fairseq_alma.learners.learner import LEARNERS
from fairseq_alma.learners.presets import PRESETS, Preset, is_same, usual_training
from fairseq_alma.options import flag, options_of
from fairseq_alma.runs.study import FREE_OPTIONS, ROUNDING_OPTIONS

TEXT, IMAGES = "text", "images"
MAX_UPDATE = "--max-update"
# The paper's learners in the order in which they are listed, with the colour that always stands for each.
LEARNER_COLOURS = {
    "sm": "#0072B2", "moe": "#56B4E9", "ens": "#D55E00", "bagging": "#882255", "umix": "#009E73", "gens": "#E69F00",
    "gmoe": "#CC79A7", "firefly": "#333333",
}  # fmt: skip
# Options of fairseq-train that say how large a model is, and how the size of the backbone spells them.
SIZES = {
    "--decoder-layers": "{} layers", "--decoder-embed-dim": "width {}", "--width": "width {}",
    "--channels": "{} channels", "--hidden-layers": "{} hidden layers",
}  # fmt: skip
# Words of an architecture's name that say something about its size, whichever learner it is for.
SIZE_WORDS = ("tiny", "base", "large", "mlp", "vgg")
_NO_VARIANT = ("wait", "replay", "drop_rest", "iid", "grow_schedule", *FREE_OPTIONS, *ROUNDING_OPTIONS)
_IN_ONE_WORD = ("grow_method", "grow_select", "combine", "init")
PLACE_AND_PACE = ("--num-workers", "--cpu")
"""Training options that say where and how fast something runs, not what comes out."""
WAITING, NOT_YET = "*", "–"
MAX_SIZES = 5  # of a model that grows, to be listed


def experiment_key(stream: Mapping[str, Any]) -> list[Any]:
    """Return what two streams share whose results compare.

    Streams of images that differ by their own seed alone (the same images in another order) belong to one experiment;
    of text, only a stream and itself do.
    """
    if stream["kind"] == IMAGES and stream.get("source") is not None:
        return [stream["source"], stream.get("dataset"), stream["num_megabatches"]]
    return [stream["fingerprint"]]


def printable_record(value: Any) -> Any:
    """Spell out what would steer a terminal, or break a line, in all texts of a JSON value."""
    if isinstance(value, dict):
        return {printable(name): printable_record(each) for name, each in value.items()}
    if isinstance(value, list):
        return [printable_record(each) for each in value]
    return printable(value) if isinstance(value, str) else value


def name_of(learner: str, kind: str) -> str:
    """Return what the paper calls a learner: the label that it declares; of one that is not registered its name."""
    known = LEARNERS[kind].get(learner)
    return known.label or learner if known else learner


def label_of(run: Mapping[str, Any]) -> str:
    """Name learner, waiting time, variant and preset, as the paper's tables do: what is not the default is added."""
    name, preset, iid = name_of(run["learner"], run["stream"]["kind"]), preset_of(run), run["options"].get("iid")
    if iid is not None:
        return f"{name} iid k{iid}"
    unusual = _unusual_options(run)
    words = [f"{name}_w{run['options']['wait']}", *(["replay"] if run["options"]["replay"] else [])]
    words += [unusual[each] for each in _IN_ONE_WORD if each in unusual]
    return " ".join([*words, *([f"({preset})"] if preset else [])])


def variant_of(run: Mapping[str, Any]) -> str:
    """Name a learner with its options, whatever the waiting time, replay and the preset: ``Ens vote``."""
    unusual = _unusual_options(run)
    words = [name_of(run["learner"], run["stream"]["kind"])]
    words += [unusual.pop(each) for each in _IN_ONE_WORD if each in unusual]
    return " ".join([*words, *(f"{flag(name)} {value}" for name, value in unusual.items())])


def _unusual_options(run: Mapping[str, Any]) -> dict[str, str]:
    """Return which options of alma-stream are neither the default nor what the preset says."""
    options, learner, kind = run["options"], run["learner"], run["stream"]["kind"]
    known = LEARNERS.get(kind, {}).get(learner)
    usual = {} if known is None else {name: each.default_on(kind) for name, each in options_of(known).items()}
    usual |= {
        "init": usual_init(learner, kind), "grow_method": "copy" if kind == TEXT else "split", "grow_select": "loss",
        "combine": "probabilities",
    }  # fmt: skip
    given, said = _overridden(run), _preset_options(run)
    told_by_preset = [name for name in said if flag(name) not in given]
    return {
        name: str(value) for name, value in options.items()
        if name not in (*_NO_VARIANT, *told_by_preset)
        and (flag(name) in given or not (value in (None, False) or is_same(value, usual.get(name))))
    }  # fmt: skip


def _overridden(run: Mapping[str, Any]) -> list[str]:
    """Return the options in which a run does not go by its preset."""
    return list((run.get("preset") or {}).get("overridden", ()))


def _preset_options(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a run's preset says of its learner's own options; nothing of the paper's, which is the default."""
    known = _known_preset(run)
    return {} if known is None else known.learner_options(run["learner"])


def _known_preset(run: Mapping[str, Any]) -> Optional[Preset]:
    return PRESETS.get(preset_of(run).replace(" ", "-"))


def preset_of(run: Mapping[str, Any]) -> str:
    """Name the preset that a run was made with; empty for the paper's, which is the default."""
    name = str((run.get("preset") or {}).get("name", ""))
    return "" if name == "paper" else name.replace("-", " ")


def setting_of(run: Mapping[str, Any]) -> str:
    """Spell how images are trained on, which learners that are compared must share; empty for the paper's way."""
    if run["stream"]["kind"] == TEXT:
        return ""
    preset, given, options = preset_of(run), _overridden(run) if preset_of(run) else [], run["train_options"]
    arch = str(options.get("--arch", ""))
    known = _known_preset(run)
    said = {} if known is None else known.train_options(run["learner"], arch)
    usual = usual_training(arch) | {name: value for name, value in said.items() if value is not None}
    parts = [flag(name) + f" {run['options'][name]}" for name in _preset_options(run) if flag(name) in given]
    for name, value in options.items():
        is_setting = name not in (*NETWORK, *FREE_OPTIONS, *PLACE_AND_PACE)
        if is_setting and (name in given or not is_same(value, usual.get(name))):
            parts.append(f"{name} {value}")
    return ", ".join([preset, *parts] if preset else parts)


def usual_init(learner: str, kind: str) -> str:
    """Return what a learner's stages begin with unless the user says otherwise; an unknown one: ``previous``."""
    known = LEARNERS.get(kind, {}).get(learner)
    return "previous" if known is None else str(options_of(known)["init"].default_on(kind))


def backbone_of(train_options: Mapping[str, Any]) -> str:
    """Spell the size of the backbone, the same for all learners over it: ``mlp, width 64``; empty if it is not said."""
    words = [word for word in str(train_options.get("--arch", "")).split("_") if word in SIZE_WORDS]
    words += [spelling.format(train_options[name]) for name, spelling in SIZES.items() if train_options.get(name)]
    return ", ".join(words)


def show_params(params: Mapping[int, int]) -> str:
    """Spell the number of parameters; of a learner that grows, the first and the last."""
    if not params:
        return show_count(None)
    first, last = show_count(params[min(params)]), show_count(params[max(params)])
    return last if first == last else f"{first} to {last}"


def show_experts(num_experts: Mapping[int, int], num_members: Mapping[int, int]) -> str:
    """Spell experts as the paper does: ``4``, or two models with 4 each ``4@2``; all sizes in turn.

    Of many sizes the first and the last; of models without experts only their number: ``5 models``.
    """
    several = any(members > 1 for members in num_members.values())
    only_models = several and all(experts == 1 for experts in num_experts.values())
    sizes: list[str] = []
    for arrival, experts in sorted(num_experts.items()):
        size = f"{experts}@{num_members[arrival]}" if several else f"{experts}"
        size = size.removeprefix("1@") if only_models else size
        sizes += [size] if size not in sizes[-1:] else []
    text = ", ".join(sizes) if len(sizes) <= MAX_SIZES else f"{sizes[0]} to {sizes[-1]}"
    return f"{text} models" if only_models else text or "–"


def show_number(value: Optional[float], digits: int) -> str:
    """Spell a number with that many decimals; `WAITING` for None, `NOT_YET` for NaN."""
    return WAITING if value is None else NOT_YET if math.isnan(value) else f"{value:,.{digits}f}"


def show_count(value: Optional[float]) -> str:
    """Spell a large count in three digits: ``65.4M``."""
    if value is None or math.isnan(value):
        return NOT_YET
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}" if value < 1000 * limit else f"{value / limit:,.0f}{unit}"
    return f"{value:g}"


def show_power(value: float) -> str:
    """Spell a very large number in scientific notation: ``3.62e+11``."""
    return f"{value:.2e}" if value else "0"


@functools.cache
def _templates() -> Any:
    import jinja2

    entries = tomllib.loads(resources.files(__package__).joinpath("sentences.toml").read_text(encoding="utf-8"))
    texts = {(name, part): " ".join(text.split()) for name, entry in entries.items() for part, text in entry.items()}
    loader = jinja2.DictLoader(
        {name if part == "text" else f"{name}/{part}": text for (name, part), text in texts.items()}
    )
    return jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined)


def said(name: str, /, **facts: Any) -> tuple[str, str]:
    """Return the title of a table or figure, and what is said below it, from what the sentences ask for."""
    title, text = (_templates().get_template(each).render(facts) for each in (f"{name}/title", name))
    return title, text
