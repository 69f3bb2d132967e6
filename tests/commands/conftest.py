import sys

import pytest

from basicsr import cli


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run the console command in this process and a folder of its own: (status, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, 'argv', ['basicsr', *map(str, arguments)])
        try:
            cli.main()
            status = 0
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return call
