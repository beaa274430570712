"""Slices of mega-batches that a model is tested on: held out of them, and trained on."""

import pytest

from data_prep.text.command import main as prepare
from tests.text.stock_commands import write_text


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slices")
    write_text(folder / "text.txt", num_documents=120)
    sizes = ["--vocab-size", "256", "--valid-bytes", "600", "--test-bytes", "600", "--holdout-bytes", "1200"]
    prepare([str(folder / "text.txt"), "--out", str(folder / "S"), "--megabatches", "2", *sizes, "--workers", "1"])
    return folder / "S"
