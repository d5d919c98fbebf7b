"""`da-jax generate --thinking`."""

import sys

import pytest

from da_jax.cli import main as cli


def test_thinking_is_refused_where_the_chat_template_has_none(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["da-jax", "generate", "--thinking"])
    with pytest.raises(SystemExit) as done:
        cli.main()
    assert done.value.code == 1
    assert "da-jax: thinking=True, but the chat template knows no thoughts" in (
        capsys.readouterr().err
    )
