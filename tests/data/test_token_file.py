"""Token files: the bytes that fairseq's own reader and writer agree with."""

import numpy as np
import pytest

from fairseq_alma.data.stream import StreamFile
from fairseq_alma.data.tokens import TokenFile, TokenFileWriter, id_dtype
from fairseq_alma.errors import AlmaError

SEQUENCES = [[4, 5, 2], [2], [65000, 7, 8, 9, 2]]


def write(prefix, sequences=SEQUENCES, dtype="uint16"):
    """Write the sequences in two parts; return size and sha256 of both files."""
    with open(f"{prefix}.bin", "wb") as tokens, open(f"{prefix}.idx", "wb") as index:
        writer = TokenFileWriter(tokens, index, np.dtype(dtype))
        for part in (sequences[:2], sequences[2:]):
            ids = np.array([id_ for sequence in part for id_ in sequence], dtype=dtype)
            writer.write(ids, np.array([len(sequence) for sequence in part]))
        return writer.close()


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_fairseq_reads_what_was_written(tmp_path, dtype):
    from fairseq.data.indexed_dataset import MMapIndexedDataset

    described = write(tmp_path / "valid", dtype=dtype)
    dataset = MMapIndexedDataset(str(tmp_path / "valid"))
    assert [item.tolist() for item in dataset] == SEQUENCES
    for (size, digest), suffix in zip(described, ("bin", "idx"), strict=True):
        assert StreamFile(f"valid.{suffix}", size, digest) == StreamFile.describe(tmp_path, f"valid.{suffix}")


def test_files_equal_those_of_fairseq_byte_for_byte(tmp_path):
    import torch
    from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder

    write(tmp_path / "ours")
    builder = MMapIndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for sequence in SEQUENCES:
        builder.add_item(torch.tensor(sequence))
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()


def test_own_reader_gives_sizes_and_ids(tmp_path):
    write(tmp_path / "a")
    file = TokenFile(tmp_path / "a")
    assert file.sizes.tolist() == [3, 1, 5]
    assert file.ids.tolist() == [id_ for sequence in SEQUENCES for id_ in sequence]


def test_token_file_that_is_cut_off_is_refused(tmp_path):
    write(tmp_path / "a")
    (tmp_path / "a.bin").write_bytes((tmp_path / "a.bin").read_bytes()[:-2])
    with pytest.raises(AlmaError, match=r"a\.bin: 16 bytes found, its index needs 18"):
        TokenFile(tmp_path / "a")


def test_index_of_another_format_is_refused(tmp_path):
    write(tmp_path / "a")
    (tmp_path / "a.idx").write_bytes(b"TNTIDX\x00\x00")
    with pytest.raises(AlmaError, match="not an index"):
        TokenFile(tmp_path / "a")


@pytest.mark.parametrize("vocab_size", [1, 65495, 65496, 100_000])
def test_id_type_is_the_one_fairseq_chooses(vocab_size):
    from fairseq.data.indexed_dataset import best_fitting_int_dtype

    assert id_dtype(vocab_size) == np.dtype(best_fitting_int_dtype(vocab_size + 4))
