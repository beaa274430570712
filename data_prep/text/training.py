"""The second pass: the tokenizer's sample and the n-grams of what is held out, and what is made of both.

The sample is of the first mega-batch, because a learner cannot see what has not arrived.
"""

import io
import json
import os
from typing import Generator, Iterable, Iterator

import numpy as np

from data_prep.text.buckets import records_of, survey_of
from data_prep.text.deal import cuts_of
from data_prep.text.options import AUTO, vocab_size_for
from data_prep.text.passes import PassProgress, SingleStep, Step, Work
from data_prep.text.pool import Progress
from fairseq_alma.data.ngrams import NgramHasher, distinct, held_out_ngrams
from fairseq_alma.data.tokens import FILE_NAMES, StreamTokenizer
from fairseq_alma.errors import AlmaError

HELD_OUT_NGRAMS = "held-out-ngrams.npy"
_CHOSEN, _HELD_OUT = 1, 2
_SAMPLE, _NGRAMS = "sample.json", "held-out.npz"
_DONE = "trained.json"


class GatherPieces(Step):
    """Note the documents of a piece that are in the tokenizer's sample, and the n-grams of those that are held out."""

    title = "reading the tokenizer's sample"
    leaves = _NGRAMS

    def num_tasks(self, work: Work) -> int:
        trains, looks = work.there is None and work.options.tokenizer is None, work.options.ngram is not None
        return len(work.pieces) if work.there is None and (trains or looks) else 0

    def make(self, work: Work, number: int) -> Generator[Progress, None, None]:
        chosen: list[str] = []
        hashes = [np.empty(0, np.uint64)]
        hasher = NgramHasher(work.options.decontaminate_ngram)
        marks = _marks(work, number)
        for documents, of_block, num_bytes in work.documents(number, marks) if marks.any() else ():
            chosen += [documents[each] for each in np.flatnonzero(of_block == _CHOSEN)]
            hashes.append(hasher([documents[each] for each in np.flatnonzero(of_block == _HELD_OUT)]).hashes)
            yield num_bytes, 0
        work.of_piece(number).write(_SAMPLE, json.dumps(chosen).encode())
        work.of_piece(number).save(_NGRAMS, hashes=distinct(hashes))


def _marks(work: Work, number: int) -> np.ndarray:
    marks = np.zeros(work.once(survey_of).piece_sizes[number], np.uint8)
    records, cuts = records_of(work, number), work.once(cuts_of)
    sets = cuts.sets_of(records)
    if work.options.tokenizer is None:
        marks[records["row"][(sets == 0) & (records["key"] <= np.uint64(cuts.sample))]] = _CHOSEN
    if work.options.ngram is not None:
        marks[records["row"][cuts.are_held_out(records)]] = _HELD_OUT
    return marks


class TrainTokenizer(SingleStep):
    """Bring the tokenizer, trained or given, and the n-grams of what is held out to their places."""

    takes_memory = True
    leaves = _DONE

    def make(self, work: Work, number: int) -> Generator[Progress, None, None]:
        numbers, options = range(len(work.pieces)), work.options
        if options.ngram is not None:
            if work.there is not None:
                hashes = held_out_ngrams(work.there, options.ngram)
            else:
                hashes = distinct([work.of_piece(each).load(_NGRAMS)["hashes"] for each in numbers])
            with work.folder.writing(HELD_OUT_NGRAMS) as file:
                np.save(file, hashes)
        if work.there is None and options.tokenizer is None:
            kind, content = options.training[0], _trained(work)
        else:
            given = work.once(_given_of)
            kind, content = given.kind, given.file.read_bytes()
            for path in given.companions:
                work.folder.write(path.name, path.read_bytes())
        work.folder.write(FILE_NAMES[kind], content)
        work.folder.write(_DONE, json.dumps(FILE_NAMES[kind]).encode())
        yield 0, 0


def _given_of(work: Work) -> StreamTokenizer:
    if work.there is not None:
        return StreamTokenizer.open(work.there.root)
    assert work.options.tokenizer is not None
    return StreamTokenizer(work.options.tokenizer)


def _trained(work: Work) -> bytes:
    kind, _, vocab_size = work.options.training
    if vocab_size == AUTO:
        vocab_size = vocab_size_for(work.once(cuts_of).words)
    pieces = [work.of_piece(number) for number in range(len(work.pieces))]
    with PassProgress("training the tokenizer", sum(piece.size(_SAMPLE) for piece in pieces)) as progress:

        def samples() -> Iterator[list[str]]:
            for piece in pieces:
                content = piece.read(_SAMPLE)
                documents = json.loads(content)
                yield documents
                progress.update((len(content), sum(len(document.split()) for document in documents)))

        return train_tokenizer(kind, samples(), vocab_size, work.num_workers)


def tokenizer_file_of(work: Work) -> str:
    """Return the name of the tokenizer's file in the work folder."""
    return json.loads(work.folder.read(_DONE))


def tokenizer_of(work: Work) -> StreamTokenizer:
    """Return the tokenizer of the stream."""
    return StreamTokenizer(work.folder.here(work.once(tokenizer_file_of)))


_SENTENCE_BYTES = 1 << 16  # a longer line is cut: sentencepiece would leave it out
_SENTENCEPIECE_THREADS = 2  # fixed: its sums, and so its vocabulary, depend on this number


def train_tokenizer(kind: str, batches: Iterable[list[str]], vocab_size: int, num_threads: int) -> bytes:
    """Train a tokenizer.

    Args:
        kind: ``tokenizers`` (byte-level BPE) or ``sentencepiece`` (unigram with bytes for what is rare).
        batches: documents, a list at a time.
        vocab_size: vocabulary size wanted, in tokens; a small text may give fewer.
        num_threads: threads to use where the result does not depend on it.

    Returns:
        The content of the tokenizer's file.
    """
    if kind == "tokenizers":
        return _train_byte_level_bpe(batches, vocab_size, num_threads)
    return _train_sentencepiece(batches, vocab_size)


def _train_byte_level_bpe(batches: Iterable[list[str]], vocab_size: int, num_threads: int) -> bytes:
    os.environ.setdefault("RAYON_NUM_THREADS", str(num_threads))
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if num_threads > 1 else "false"
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(batches, trainer)
    return tokenizer.to_str(pretty=True).encode()


def _train_sentencepiece(batches: Iterable[list[str]], vocab_size: int) -> bytes:
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=_sentences(batches),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            byte_fallback=True,
            # what is decoded must be what was encoded
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            max_sentence_length=_SENTENCE_BYTES,
            num_threads=_SENTENCEPIECE_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise AlmaError(
            f"--vocab-size {vocab_size}: sentencepiece cannot train on the first mega-batch ({error}); give another "
            "number, or a larger first mega-batch"
        ) from error
    return model.getvalue()


def _sentences(batches: Iterable[list[str]]) -> Iterator[str]:
    """Yield the lines of the documents, in pieces that sentencepiece takes."""
    longest = _SENTENCE_BYTES // 4  # characters; one takes four bytes at most
    for batch in batches:
        for document in batch:
            for line in document.split("\n"):
                yield from (line[start : start + longest] for start in range(0, len(line), longest))
