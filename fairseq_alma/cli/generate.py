"""``alma-generate``: text from a prompt."""

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence

from fairseq_alma.cli.entry import Parser, command
from fairseq_alma.errors import AlmaError, refuse_no_file
from fairseq_alma.options import flag, operand, opt, options_of, real, utf8_path, whole
from fairseq_alma.runs.lookup import MODEL_HELP, ArrivalOptions, find_model, stream_option
from fairseq_alma.terminal import tell, write

SAMPLING = ("temperature", "top_p", "seed")
EPILOG = """\
  alma-generate RUN --arrival 3 --prompt "In the beginning" --seed 1
  alma-generate FOLDER --prompts prompts.txt --seed 1 > texts.jsonl
"""


@dataclass(frozen=True)
class GenerateOptions(ArrivalOptions):
    """What is written, and how."""

    model: Path = operand(MODEL_HELP, "MODEL", parse=utf8_path)
    prompt: str = opt("", "what the text begins with (default: nothing)", metavar="TEXT")
    prompts: Optional[Path] = opt(None, "batch mode: a prompt per line; prints a JSON line for each", metavar="FILE")
    max_tokens: int = opt(100, "new tokens", range=whole(1))
    greedy: bool = opt(False, "take the most probable token each time (default: sample)")
    temperature: float = opt(1.0, "of sampling", range=real(1e-20, 1e3), metavar="T")
    top_p: float = opt(
        0.9,
        "sample from the most probable tokens that have P of the probability together",
        range=real(0, 1, above=True),
        metavar="P",
    )
    seed: int = opt(1, "of sampling", range=whole(0, 2**63 - 1))
    batch_size: int = opt(16, "prompts at a time", range=whole(1))
    stream: Optional[Path] = stream_option()


def build_parser() -> Parser:
    """Return the command's parser."""
    said = "Write text that follows a prompt, token by token. One model or an ensemble."
    parser = Parser.of("alma-generate", said, EPILOG)
    parser.add_argument("model", **GenerateOptions.operands()["model"])
    prompts = parser.add_mutually_exclusive_group()
    for name, option in options_of(GenerateOptions).items():
        option.add_to(prompts if name.startswith("prompt") else parser)
    return parser


@command
def main(argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Run ``alma-generate``."""
    parser = build_parser()
    given = parser.parse_args(argv)
    args = GenerateOptions.read(given)
    for name in SAMPLING:
        if args.greedy and vars(given)[name] is not None:
            parser.error(f"--greedy does not sample, so it takes no {flag(name)}")
    try:
        args = replace(args, prompt=os.fsencode(args.prompt).decode())
    except UnicodeError:
        parser.error(f"--prompt {args.prompt!a}: not UTF-8; give a text in UTF-8")
    if args.prompts is not None:
        if not args.prompts.exists():
            raise AlmaError(f"--prompts {args.prompts}: no such file; give a text file, a prompt per line")
        refuse_no_file(args.prompts, "--prompts", "give a text file, a prompt per line")
    # These import torch, which takes seconds; --help and usage errors need none of it.
    import torch

    from fairseq_alma.exchange.load_model import load_model

    loaded = load_model(find_model(args.model, args.arrival), args.stream)
    torch.manual_seed(args.seed)
    if args.prompts is None:
        _show(args, loaded)
        return 0
    prompts = _read_prompts(args.prompts)
    for prompt, text in zip(prompts, _continue(args, loaded, prompts), strict=True):
        print(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False), flush=True)
    return 0


def _read_prompts(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # nothing else ends a line: a form feed is part of one
        return lines if lines[-1] else lines[:-1]
    except UnicodeDecodeError as error:
        raise AlmaError(f"--prompts {path}: not UTF-8 ({error}); give a text file, a prompt per line") from error


def _options(args: GenerateOptions, room: int) -> dict[str, Any]:
    options: dict[str, Any] = {"max_new_tokens": room, "do_sample": not args.greedy}
    return options if args.greedy else {**options, "temperature": args.temperature, "top_p": args.top_p, "top_k": 0}


def _ids(loaded: Any, prompts: Sequence[str]) -> list[list[int]]:
    rows = [[loaded.first, *ids] for ids in loaded.tokens.encode(list(prompts))]
    for prompt, ids in zip(prompts, rows, strict=True):
        if len(ids) >= loaded.longest:
            raise AlmaError(
                f"prompt {prompt[:40]!r}: {len(ids)} tokens, the model takes {loaded.longest} with what follows; "
                "give a shorter one"
            )
    return rows


def _show(args: GenerateOptions, loaded: Any) -> None:
    """Print the text while it is written, as far as characters are whole."""
    import torch

    shown = ""

    class Streamer:
        """What transformers' generate calls with each new token."""

        def __init__(self) -> None:
            self.ids: list[int] = []

        def put(self, value: Any) -> None:
            nonlocal shown
            self.ids = [*self.ids, *value.flatten().tolist()]
            text = loaded.tokens.decode(self.ids)
            if text.startswith(shown) and not text.endswith("\ufffd"):
                write(sys.stdout, text[len(shown) :])
                shown = text

        def end(self) -> None:
            text = loaded.tokens.decode(self.ids)
            tell(text[len(shown) :] if text.startswith(shown) else f"\n{text}", sys.stdout)

    ids = torch.tensor(_ids(loaded, [args.prompt]))
    room = min(args.max_tokens, loaded.longest - ids.size(1))
    _note_room(args, loaded, [room])
    loaded.model.generate(ids, streamer=Streamer(), **_options(args, room))


def _continue(args: GenerateOptions, loaded: Any, prompts: Sequence[str]) -> Iterator[str]:
    """Yield the text of each prompt, in their order.

    Only prompts that get as many new tokens go through the model together, so none is cut short by a longer one beside
    it: where --max-tokens fits they have that in common, and where it does not their length. Shorter ones are padded on
    the left.
    """
    rows = _ids(loaded, prompts)
    rooms = [min(args.max_tokens, loaded.longest - len(row)) for row in rows]
    _note_room(args, loaded, rooms)
    for start in range(0, len(rows), args.batch_size):
        batch = range(start, min(start + args.batch_size, len(rows)))
        texts: dict[int, str] = {}
        for room in dict.fromkeys(rooms[number] for number in batch):
            together = [number for number in batch if rooms[number] == room]
            found = _generate(args, loaded, [rows[number] for number in together], room)
            texts |= dict(zip(together, found, strict=True))
        yield from (texts[number] for number in batch)


def _generate(args: GenerateOptions, loaded: Any, rows: Sequence[Sequence[int]], room: int) -> list[str]:
    """Return the text of each row of ids and of what follows it."""
    import torch

    longest, pad = max(map(len, rows)), loaded.model.config.pad_token_id
    ids = torch.tensor([[pad] * (longest - len(row)) + [*row] for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    found = loaded.model.generate(ids, attention_mask=mask, **_options(args, room))
    return [loaded.tokens.decode(row) for row in found.tolist()]


def _note_room(args: GenerateOptions, loaded: Any, rooms: Sequence[int]) -> None:
    """Say so where the model does not take as many tokens as were asked for."""
    short = [room for room in rooms if room < args.max_tokens]
    if not short:
        return
    which = f"at most {short[0]} follow" if len(rooms) == 1 else f"{len(short)} of {len(rooms)} prompts get fewer"
    tell(
        f"note: --max-tokens {args.max_tokens}: the model takes {loaded.longest} tokens, the prompt's included, so "
        f"{which}",
        sys.stderr,
    )
