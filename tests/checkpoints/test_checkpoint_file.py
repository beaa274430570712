import os

import torch

from fairseq_alma.checkpoints.checkpoint_file import load_archive


def test_a_file_replaced_while_torch_reads_it_loads_completely(tmp_path, monkeypatch):
    path, mapped = tmp_path / "a.pt", torch.UntypedStorage.from_file
    torch.save({"moments": torch.ones(5000), "model": torch.arange(1000.0)}, path)

    def replace_and_map(*arguments):  # torch maps the tensors after it has opened the pickle
        torch.save({"model": torch.arange(1000.0)}, tmp_path / "b.pt")
        os.replace(tmp_path / "b.pt", path)
        return mapped(*arguments)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", replace_and_map)
    loaded = load_archive(path, mmap=True)
    assert torch.equal(loaded["model"], torch.arange(1000.0)) and loaded["moments"].sum() == 5000
