"""What makes the engine cheap for tests gives what the engine gives."""

from tests.text import stock_commands


def test_a_configuration_that_is_kept_is_the_one_that_fairseq_makes(tmp_path):
    for name in ("a", "b"):
        options = ["--megabatch", "1", "--save-dir", f"{tmp_path}/{name}", "--ema-half-life", "1/8"]
        options += ["--finetune-from-model", f"{tmp_path}/{name}.pt"]
        kept = stock_commands.training_config(tmp_path / name, *options)
        arguments = stock_commands.training_options(tmp_path / name, *options)
        assert kept == stock_commands.convert_namespace_to_omegaconf.__wrapped__(arguments)
        assert kept.checkpoint.save_dir == f"{tmp_path}/{name}" and kept.task.data == str(tmp_path / name)
