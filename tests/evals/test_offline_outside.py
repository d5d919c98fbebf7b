"""Right values outside of the answer that is scored."""

import pytest

from da_jax.evals.offline.outside import outside
from da_jax.evals.records import Record

DECLARED = (
    '<global>Chunk 1.</global><focus magic_chunks="1">1234567</focus><local>It is read now.</local>'
)


def record(text, answer, expected=("1234567",), arm="da", index=0):
    return Record(
        task="niah_single_noise", group="single", length=1024, seed=0, index=index, arm=arm,
        prompt_sha256="", chunks=1, prompt_tokens=9, completion_tokens=9, finish_reason="stop",
        text=text, answer=answer, token_ids=(), expected=expected, score=0.0, score_details={},
        summary={}, trace=(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "answer", "expected", "found"),
    [
        (f"{DECLARED}\nAnswer: 1,234,567", "It is read now.", ("1234567",), True),
        (f"{DECLARED}\n**Answer:** abcd", "It is read now.", ("ABCD",), True),
        (f"{DECLARED}\nAnswer: a and b", "It is a.", ("a", "b"), True),
        (f"{DECLARED}\nAnswer: 7", "It is 17.", ("7",), True),
        (f"{DECLARED}\nAnswer: 17", "It is read now.", ("7",), False),
        (f"{DECLARED}\nAnswer: 7654321", "It is read now.", ("1234567",), False),
        (f"{DECLARED}\nAnswer: 1234567. Answer: no", "It is read now.", ("1234567",), False),
        (f"{DECLARED}\n1234567", "It is read now.", ("1234567",), False),
        ("<local>Answer: 1234567</local>", "Answer: 1234567", ("1234567",), False),
        ("I think.\nAnswer: 1234567", "I think.\nAnswer: 1234567", ("1234567",), False),
    ],
)
def test_a_right_value_after_the_last_answer_line_is_outside(text, answer, expected, found):
    assert outside(record(text, answer, expected)) is found
