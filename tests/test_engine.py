"""What makes the engine cheap for tests gives what the engine gives."""

from tests.engine import VARIED, parse_options_once
from tests.text import stock_commands


def test_a_configuration_that_is_kept_is_the_one_that_fairseq_makes(tmp_path, monkeypatch):
    parse_options_once(monkeypatch, tmp_path / "parsed")
    for number, name in enumerate("ab", 1):
        options = ["--megabatch", str(number), "--save-dir", f"{tmp_path}/{name}", "--ema-half-life", "1/8"]
        options += ["--finetune-from-model", f"{tmp_path}/{name}.pt", "--gen-subset", f"{name}/slice"]
        options += ["--optimizer", "sgd"]  # which has no configuration class
        for varied in VARIED.keys() - {"gen_subset", "megabatch", "batch_size_valid"}:
            options += [f"--{varied.replace('_', '-')}", str(10 * number)]
        kept = stock_commands.training_config(tmp_path / name, *options)
        arguments = stock_commands.training_options(tmp_path / name, *options)
        assert kept == stock_commands.convert_namespace_to_omegaconf.__wrapped__(arguments)
        assert kept.checkpoint.save_dir == f"{tmp_path}/{name}" and kept.task.data == str(tmp_path / name)
        assert (kept.task.megabatch, kept.optimizer.batch_size) == (number, 10 * number)
        assert kept.dataset.gen_subset == f"{name}/slice"
    assert len([*(tmp_path / "parsed").iterdir()]) == 1
