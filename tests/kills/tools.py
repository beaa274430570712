"""The commands beside ``alma-stream``: those that write one file or folder are given again, ``alma-update`` resumes."""

import importlib
import shutil
from pathlib import Path
from typing import NamedTuple

from fairseq_alma.cli.ensemble import main as alma_ensemble
from fairseq_alma.cli.export import main as alma_export
from fairseq_alma.cli.grow import main as alma_grow
from fairseq_alma.cli.import_model import main as alma_import
from fairseq_alma.cli.update import main as alma_update
from tests.exchange.conftest import save, transformer_config, write_stream
from tests.exchange.test_import import write_folder
from tests.kills.crashes import Crash
from tests.kills.launch import Main, launch
from tests.kills.learners import write_text

MODELS = "models"
TINY = ["--", "--decoder-embed-dim", "8", "--decoder-ffn-embed-dim", "16", "--decoder-attention-heads", "1", "--cpu"]
SPLIT = ["--method", "split", "--experts", "1", "--cpu"]
TOOLS: dict[str, tuple[Main, list[str]]] = {
    "export": (alma_export, ["{models}/a.pt", "--out", "{run}/to/folder"]),
    "import": (alma_import, ["{models}/model", "--out", "{run}/to/a.pt"]),
    "grow": (
        alma_grow,
        ["--path", "{models}/a.pt", "--out", "{run}/to/grown.pt", "--stream", "{models}/S", *SPLIT],
    ),
    "ensemble": (alma_ensemble, ["{models}/a.pt", "{models}/b.pt", "--out", "{run}/to/E.pt", "--embed"]),
    "update": (alma_update, ["{run}/to", "{models}/month-0.txt", *TINY]),
    "update-again": (alma_update, ["{run}/to", "{models}/month-1.txt"]),
}


class Tool(NamedTuple):
    """One command of the matrix."""

    name: str
    kind = MODELS

    @property
    def is_resumed(self) -> bool:
        """Whether it goes on where it was cut off, and is at its end where nothing is left to do."""
        return self.name.startswith("update")

    def begin(self, models: Path, run: Path) -> None:
        """Make what the command begins with: the month before."""
        if self.is_resumed:
            importlib.import_module("fairseq_alma.report.write_report")  # its commands need not import it then
        if self.name == "update-again":
            before = models / "before"
            if not before.exists():
                words, crash = Tool("update").arguments(models, before), Crash(before, models / "journal")
                assert launch(words, models / "log", crash, alma_update) == 0, (models / "log").read_text()
            shutil.copytree(before, run)

    @property
    def main(self) -> Main:
        """The command."""
        return TOOLS[self.name][0]

    def arguments(self, models: Path, run: Path) -> list[str]:
        """Return the command's; it writes into ``run``."""
        return [word.format(models=models, run=run) for word in TOOLS[self.name][1]]

    def __str__(self) -> str:
        return f"alma-{self.name}"


ALL_TOOLS = [Tool(name) for name in TOOLS]


def make_models(folder: Path) -> None:
    """Make what the commands read: untrained language models, text of two months."""
    folder.mkdir()
    stream = write_stream(folder, "--vocab-size", "340")
    for seed, name in enumerate(("a.pt", "b.pt")):
        save(folder / name, transformer_config(num_experts=2), seed, stream)
    write_folder(folder / "model")
    for month in range(2):
        write_text(folder / f"month-{month}.txt", 20, month)
