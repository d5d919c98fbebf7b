import pytest


@pytest.fixture
def bursts(random_llm, monkeypatch):
    """Tokens chosen in each burst, row 0."""
    made, decode = [], random_llm.engine.runner.decode

    def spy(rows, what):
        choice = decode(rows, what)
        made.append(int((choice.token[:, 0] >= 0).sum()))
        return choice

    monkeypatch.setattr(random_llm.engine.runner, "decode", spy)
    return made
