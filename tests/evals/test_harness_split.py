"""Prompts of lm-evaluation-harness, cut into document and question."""

import pytest

from da_jax.evals.harness_split import split_prompt

GRASS = "The grass is green. The sky is blue.\n" * 40
EDGES = "".join(f"n{n} -> n{n + 1}\n" for n in range(80))
FACTS = "Fact one.\n\nFact two is longer. " * 20


@pytest.mark.parametrize(
    ("example", "prompt", "document", "question"),
    [
        pytest.param(
            {"context": FACTS, "question": "Which?", "title": "t"},
            f"Read.\n\n{FACTS}\n\nNow answer.\nQ: Which?\nA:",
            FACTS.strip(),
            "Read.\n\nNow answer.\nQ: Which?\nA:",
            id="the question stands around the field",
        ),
        pytest.param(
            {"context": FACTS, "topic": "the older bridge"},
            f"{FACTS}\n\nAbout: the older bridge",
            FACTS.strip(),
            "About: the older bridge",
            id="another field of the example stands after it",
        ),
        pytest.param(
            {"code": GRASS},
            f"Complete the code.\n{GRASS}Next line:\n",
            GRASS.strip(),
            "Complete the code.\n\nNext line:",
            id="what is asked stands before it",
        ),
        pytest.param(
            {"text": GRASS, "gen_prefix": "Answer:"},
            f"{GRASS}\nWho wrote it? Answer:",
            GRASS.strip(),
            "Who wrote it? Answer:",
            id="a question between field and prefix",
        ),
        pytest.param(
            {"input": f"Remember.\n\n{GRASS}What is it?"},
            f"Example: 1 is it.\n\nRemember.\n\n{GRASS}What is it? Answer:",
            f"Remember.\n\n{GRASS}".strip(),
            "Example: 1 is it.\n\nWhat is it? Answer:",
            id="a question at its end, an example before it and a cue after",
        ),
        pytest.param(
            {"prompt": f"The edges:\n{EDGES}\nOperation:\nFind parents of n7.\n\nEnd with: []"},
            f"The edges:\n{EDGES}\nOperation:\nFind parents of n7.\n\nEnd with: []",
            f"The edges:\n{EDGES}".strip(),
            "Operation:\nFind parents of n7.\n\nEnd with: []",
            id="as GraphWalks, two paragraphs after a label",
        ),
        pytest.param(
            {"text": "one long line " * 20},
            "one long line " * 20 + "\n\nSummary:",
            ("one long line " * 20).strip(),
            "Summary:",
            id="a field without lines",
        ),
        pytest.param({}, f"{GRASS}\n\nWhich?", GRASS.strip(), "Which?", id="no field"),
        pytest.param(
            {}, f"Read.\n\n{GRASS}Which?", f"Read.\n\n{GRASS}".strip(), "Which?", id="one line"
        ),
        pytest.param({}, "only a question", "", "only a question", id="no document"),
        pytest.param({"q": "only a question"}, "only a question", "", "only a question", id="all"),
    ],
)
def test_the_question_is_no_part_of_the_document(example, prompt, document, question):
    assert split_prompt(example, prompt) == (document, question)
