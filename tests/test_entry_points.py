import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

import fairseq_alma


@pytest.mark.parametrize("name", fairseq_alma.COMMANDS)
def test_every_command_prints_a_short_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as raised:
        getattr(fairseq_alma, name)()
    assert raised.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"usage: {name.replace('_', '-')} ")
    assert len(lines) <= (80 if name == "alma_stream" else 45)


def test_ctrl_c_while_a_command_is_imported_is_one_line_and_status_130(monkeypatch, capsys):
    def interrupted(module):
        raise KeyboardInterrupt

    monkeypatch.setattr(fairseq_alma, "importlib", SimpleNamespace(import_module=interrupted))
    assert fairseq_alma.alma_report() == 130
    assert capsys.readouterr() == ("", "interrupted before the command started\n")


def test_setup_declares_each_entry_point(checkout):
    declared = re.findall(r'"(alma-[a-z-]+)=fairseq_alma:([a-z_]+)"', (checkout / "setup.py").read_text())
    assert declared == [(name.replace("_", "-"), name) for name in fairseq_alma.COMMANDS]


def test_the_entry_points_import_nothing_slow(checkout):
    code = "import sys; before = {*sys.modules}; import fairseq_alma; print(*sorted({*sys.modules} - before))"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=checkout, stdout=subprocess.PIPE, text=True)
    packages = {name.partition(".")[0] for name in done.stdout.split()}
    assert packages <= {"__future__", "fairseq_alma", "importlib", "warnings"}
