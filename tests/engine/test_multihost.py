"""Two processes that share a model, as two hosts would, on simulated devices."""

import socket

import numpy as np
import pytest
from support import devices, tiny

pytestmark = pytest.mark.long

CASE = "qwen3_5"  # pages and states


def run(folder, count, how="end"):
    """[(exit status, what it printed, errors)] of `count` processes, four devices in all."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    children = [
        devices.start(
            str(index), str(count), str(port), str(folder), how, devices=4 // count,
            module="support.processes",
        )
        for index in range(count)
    ]  # fmt: skip
    ended = [child.communicate(timeout=300) for child in children]
    return [(child.returncode, *texts) for child, texts in zip(children, ended)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_folder(tmp_path_factory.mktemp("two") / "model", CASE)


def test_two_processes_answer_what_one_answers_and_the_second_ends_with_the_first(folder):
    ((status, alone, errors),) = run(folder, 1)
    assert status == 0, errors
    ended = run(folder, 2)
    assert [status for status, *_ in ended] == [0, 0], ended
    (ours,), (theirs,) = devices.documents(ended[0][1]), devices.documents(alone)
    assert ours["tokens"] == theirs["tokens"] and ours["modes"] == theirs["modes"]
    for mine, other in zip(ours["logprobs"], theirs["logprobs"]):
        np.testing.assert_allclose(mine, other, atol=1e-4, rtol=0)
    assert ours["compiled"] == 0
    assert devices.documents(ended[1][1]) == [{"followed": 1}]


def test_an_error_in_the_first_process_ends_the_second_in_order(folder):
    (failed, _, errors), (status, out, trouble) = run(folder, 2, "fail")
    assert failed == 1 and "ValueError: process 0 fails" in errors
    assert status == 0, trouble
    assert devices.documents(out) == [{"followed": 1}]
