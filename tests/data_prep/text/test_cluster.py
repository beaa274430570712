"""The stages for datatrove: the same stream as that of the command to the last byte, also after a failure."""

import functools
import os
import shutil
import sys
import sysconfig

import pytest

from data_prep.text.command import main
from fairseq_alma.errors import AlmaError
from tests.data_prep.text.test_command import files_of, make_documents

pytest.importorskip("datatrove", reason="datatrove is not installed (extra cluster)")
from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.executor.base import PipelineExecutor

from data_prep.text.cluster import run_stages, stream_stages

SIZES = ["--megabatches", "3", "--vocab-size", "300"]


@pytest.fixture(autouse=True, scope="module")
def small_pieces():
    """Cut small files into pieces, so that there is work for several ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data_prep.text.documents.PIECE_SIZE", 20_000)
        patch.setattr("data_prep.text.cluster.default_workers", lambda: 1)  # threads of tokenizers do not fork
        # for each of three logs a rank, loguru looks up all library folders, which would take most of the time
        patch.setattr("sysconfig.get_path", functools.cache(sysconfig.get_path))
        yield


@pytest.fixture(scope="module")
def made(small_pieces, tmp_path_factory):
    """A folder with two files of 420 documents, 20 of them duplicates, and their stream, made by the command."""
    folder = tmp_path_factory.mktemp("made")
    documents = make_documents(400)
    (folder / "texts").mkdir()
    for number in range(2):
        (folder / f"texts/{number}.txt").write_text("\n\n".join(documents[number::2] + documents[:10]))
    assert main([str(folder / "texts"), "--out", str(folder / "one"), *SIZES, "--workers", "1"]) == 0
    return folder


@pytest.fixture
def texts(made, tmp_path):
    """Copies of the texts, which may be altered, and of the stream, ``one``."""
    shutil.copytree(made / "one", tmp_path / "one")
    return shutil.copytree(made / "texts", tmp_path / "texts")


class OneByOne(PipelineExecutor):
    """An executor that runs all ranks in this process."""

    def __init__(self, pipeline, tasks, logging_dir, depends=None):
        super().__init__(pipeline, logging_dir)
        self.tasks = tasks

    @property
    def world_size(self):
        return self.tasks

    def run(self):
        for rank in self.get_incomplete_ranks():
            self._run_for_rank(rank)

    def get_distributed_env(self, node_rank=-1):
        return LocalPipelineExecutor.get_distributed_env(self, node_rank)


def run(inputs, out, *more, tasks=2, executor=OneByOne, work=None, **options):
    stages = stream_stages([str(inputs), "--out", str(out), *more], work or f"{out}-work")
    run_stages(stages, executor, tasks, f"{out}-logs", **options)


@pytest.mark.parametrize(
    ("tasks", "options"), [(3, {}), (2, {"executor": LocalPipelineExecutor, "workers": 2, "start_method": "fork"})]
)
def test_ranks_make_the_same_stream_as_the_command(texts, tmp_path, tasks, options):
    run(texts, tmp_path / "stream", *SIZES, tasks=tasks, **options)
    assert files_of(tmp_path / "stream") == files_of(tmp_path / "one")


def test_ranks_append_the_same_mega_batches_as_the_command(texts, tmp_path):
    (tmp_path / "later.txt").write_text("\n\n".join(f"{number} new words {number * 7919}" for number in range(90)))
    shutil.copytree(tmp_path / "one", tmp_path / "stream")
    more = ["--append", "--megabatches", "2"]
    assert main([str(tmp_path / "later.txt"), "--out", str(tmp_path / "one"), *more, "--workers", "1"]) == 0
    run(tmp_path / "later.txt", tmp_path / "stream", *more)
    assert files_of(tmp_path / "stream") == files_of(tmp_path / "one")


def test_a_run_that_failed_in_a_stage_resumes_and_ends_with_the_same_stream(texts, tmp_path, monkeypatch):
    steps = [f"data_prep.text.steps.Work.{name}" for name in ("hash", "assign", "sample", "prepare", "count", "encode")]
    for function in (*steps, "fairseq_alma.data.stream.write_manifest"):
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(function, lambda *_: sys.exit(9))
            run(texts, tmp_path / "stream", *SIZES)
        assert not (tmp_path / "stream").exists()
    run(texts, tmp_path / "stream", *SIZES)
    assert files_of(tmp_path / "stream") == files_of(tmp_path / "one")


@pytest.mark.parametrize(
    ("inputs", "more", "message"),
    [
        ("-", [], "several machines cannot share standard input"),
        ("pipe", [], "this command cannot read a pipe"),
        ("texts", ["--append"], "expected a stream for --append, found no stream"),
    ],
)
def test_impossible_requests_are_refused_in_one_line(texts, tmp_path, monkeypatch, inputs, more, message):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with pytest.raises(AlmaError, match=message):
        run(inputs, tmp_path / "stream", "--megabatches", "2", *more)


def test_a_completed_run_does_nothing_again_and_its_work_is_of_no_use_to_other_commands_or_input(texts, tmp_path):
    run(texts, tmp_path / "stream", *SIZES)
    before = (tmp_path / "stream/stream.json").stat().st_mtime_ns
    run(texts, tmp_path / "stream", *SIZES)
    assert (tmp_path / "stream/stream.json").stat().st_mtime_ns == before
    words, work = [str(texts), "--out", str(tmp_path / "stream"), *SIZES], str(tmp_path / "stream-work")
    for stage in stream_stages([*words, "--seed", "2"], work)[1:]:
        with pytest.raises(AlmaError, match="contains files of a command with different options"):
            stage.run()
    for inputs, seed in ((texts, "2"), (texts / "0.txt", "1")):
        with pytest.raises(AlmaError, match="different options or input; give another work folder"):
            run(inputs, tmp_path / "stream", *SIZES, "--seed", seed)
    (texts / "0.txt").write_text("other text")
    with pytest.raises(AlmaError, match="changed while it was read"):
        stream_stages(words, work)[-1].run()
    with pytest.raises(AlmaError, match="different options or input"):
        run(texts, tmp_path / "stream", *SIZES)
    with pytest.raises(AlmaError, match="completed with another work folder"):
        run(texts, tmp_path / "stream", *SIZES, work=str(tmp_path / "new"))


def test_documents_of_a_step_before_are_refused_rather_than_lost(texts, tmp_path):
    stage = stream_stages([str(texts), "--out", str(tmp_path / "stream"), *SIZES], str(tmp_path / "work"))[0]
    with pytest.raises(AlmaError, match="another pipeline that ends with a writer"):
        stage.run(iter([Document("a text", "0")]))


def test_a_stage_with_incomplete_ranks_is_an_error(texts, tmp_path):
    class Silent(OneByOne):  # like the executor for Ray
        def run(self):
            pass

    with pytest.raises(AlmaError, match="plan: some ranks did not complete"):
        run(texts, tmp_path / "stream", *SIZES, executor=Silent)
