"""Recorded responses attend what the engine attended when it wrote them; what is wrong is named."""

import json
import subprocess
import sys

import numpy as np
import pytest
from support import prompt_fixtures as fixtures
from support import tiny
from typer.testing import CliRunner

from da_jax import Style
from da_jax.cli.main import app
from da_jax.evals import replay
from da_jax.evals.records import runs
from da_jax.protocol import recorded as recorded_lib
from da_jax.protocol.chunks import Chunk
from da_jax.protocol.modes import Arm
from da_jax.protocol.prompt import PromptRenderer
from da_jax.protocol.styles import COMPACT, PLAIN, TOOL

pytestmark = pytest.mark.long

CHUNKS = [f"part {letter}: " + letter * (9 + 5 * i) for i, letter in enumerate("abcdef")]
QUESTION = "which part?"
SCRIPTS = {
    "usual": '<global>b or e?</global><focus magic_chunks="2,5">bbb</focus><local>so</local>end',
    "declined": '<focus magic_chunks="9">x</focus><focus>y<local/><local>z<focus magic_chunks=3>',
    "unfinished": 'text<local>in<focus magic_chunks="4',
    "bytes": '<focus magic_chunks="3">żółć 東京 👩‍👧</focus><answer>é</answer>a "> b',
    "nested": '<local>a<answer>b</answer></local></think><focus magic_chunks="1-3">',
    "quoted": "say `<local>` and <local>then</local> ```\n<focus magic_chunks='6'>\n```\nx",
    "one token": "x",
}


def replayer(llm, **options):
    options = {"page_size": llm.engine.config.page_size} | options
    stop_ids = frozenset([llm.tokenizer.eos_token_id])
    return replay.Replayer(llm.tokenizer, llm.renderer, stop_ids, **options)


def read(tmp_path, *entries, **options):
    path = tmp_path / "responses.jsonl"
    path.write_text("\n".join(map(json.dumps, entries)) + "\n")
    return recorded_lib.read(path, **options)


def recorded(response, **prompt):
    return {
        **prompt,
        "response_token_ids": list(response.token_ids),
        "finish_reason": response.finish_reason,
    }


OPTIONS = [
    {},
    {"scaffold": "paper"},
    {"scaffold": "paper", "initial": "local", "answer_mode": "keep"},
    {"initial": "focus:1,4", "answer_mode": "global"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_account_is_that_of_the_engine(random_llm, tmp_path, options):
    """The forced beginnings are followed by what a random model writes: any bytes."""
    llm, entries, expected = random_llm, [], []
    for text in SCRIPTS.values():
        for more in (0, 9):
            forced = llm.tokenizer.encode(text)
            response = llm.generate(
                CHUNKS, QUESTION, forced=forced, max_tokens=len(forced) + more, **options
            )
            entries.append(recorded(response, document=CHUNKS, question=QUESTION))
            expected.append(response)
    walk = replayer(llm, **options)
    for one, response in zip(read(tmp_path, *entries), expected, strict=True):
        found = walk.replay(one)
        assert found.summary == response.summary
        assert tuple(found.steps) == response.steps
        line = json.loads(found.to_json())
        assert line["summary"] == response.summary
        assert line["trace"] == [list(run) for run in runs(response.steps)]
    assert any(response.summary["declines"] for response in expected)


@pytest.mark.parametrize("arm", ["unmasked", "vanilla"])
def test_other_arms_see_everything(random_llm, tmp_path, arm):
    forced = random_llm.tokenizer.encode(SCRIPTS["usual"])
    response = random_llm.generate(CHUNKS, QUESTION, arm=arm, forced=forced, max_tokens=len(forced))
    entry = recorded(response, document=CHUNKS, question=QUESTION, arm=arm)
    (one,) = read(tmp_path, entry)
    found = replayer(random_llm, initial="local").replay(one)
    assert found.summary == response.summary and found.summary["reduction"] == 0


def test_free_responses_of_the_shipped_checkpoint(lab, tmp_path):
    example = lab.prompts.renderer
    cases = list(lab.selection().tasks[0].examples(200, 4, 0, lab.prompts.count))
    assert example.style.da_only
    entries, expected = [], []
    for case in cases:
        response = lab.llm.generate(case.document, case.question, max_tokens=64)
        prompt = lab.llm.request(case.document, case.question).prompt
        expected += [response] * 3
        ways = (
            {"document": case.document, "question": case.question},
            {"messages": [{"role": "user", "content": case.question}], "documents": case.document},
            {"prompt": prompt.text},
        )
        entries += [recorded(response, **way) for way in ways]
    walk = replayer(lab.llm)
    for one, response in zip(read(tmp_path, *entries), expected, strict=True):
        found = walk.replay(one)
        assert found.summary == response.summary and tuple(found.steps) == response.steps
    assert {response.finish_reason for response in expected} == {"stop"}
    assert any(response.summary["attended"]["focus"] for response in expected)


def pages(visible, page_size):
    """Pages of each run of visible positions, one that two runs share counted for both."""
    edges = np.flatnonzero(np.diff([0, *visible.astype(int), 0]))
    return sum(
        (end - 1) // page_size - start // page_size + 1 for start, end in edges.reshape(-1, 2)
    )


PIECES = [("a", None), ('<focus magic_chunks="2,5">', (2, 5)), ("bcd", (2, 5)), ("</focus>", None),
          ("<local>", ()), ("efgh" * 9, ()), ("</local>", None), ("i", None)]  # fmt: skip


@pytest.mark.parametrize("scaffold", ["all", "paper"])
@pytest.mark.parametrize("page_size", [1, 7, 16, 64, 1024])
def test_steps_are_those_of_a_count_position_by_position(random_llm, tmp_path, page_size, scaffold):
    prompt = random_llm.request(CHUNKS, QUESTION).prompt
    ids, shown, now = [], [], None
    for text, after in PIECES:
        tokens = random_llm.tokenizer.encode(text)
        ids += tokens
        shown += [now] * (len(tokens) - 1) + [after]
        now = after
    expected = []
    for step, chunks in enumerate(shown[:-1], 1):
        visible = np.zeros(len(prompt) + step, bool)
        visible[len(prompt) :] = True
        if scaffold == "paper":
            visible[:16] = True
            visible[prompt.scaffold[-1][0] :] = True
        for start, end in prompt.scaffold if scaffold == "all" else ():
            visible[start:end] = True
        for start, end in prompt.chunks if chunks is None else [prompt.span_of[c] for c in chunks]:
            visible[start:end] = True
        if chunks is None:
            visible[:] = True
        expected.append((visible.sum(), pages(visible, page_size) * page_size))
    entry = {"document": CHUNKS, "question": QUESTION, "response_token_ids": ids}
    found = replayer(random_llm, page_size=page_size, scaffold=scaffold).replay(
        read(tmp_path, entry)[0]
    )
    assert [(step.attended, step.read) for step in found.steps] == expected


NUMBERS = {
    "prompt_tokens": 100,
    "chunk_spans": [[10, 40], [40, 90]],
    "response": "<local>ab</local>c",
}


def test_an_example_computed_by_hand(random_llm, tmp_path):
    """18 tokens of a character each: 7 open, 2 are written, 8 close, 1 follows."""
    entry = {**NUMBERS, "id": "one", "score": 0.5}
    found = replayer(random_llm).replay(read(tmp_path, entry)[0])
    summary = found.summary
    assert summary["tokens"] == {"total": 18, "global": 8, "focus": 0, "local": 10}
    # Tokens 1 to 6 are fed before the ">" and token 17 is the second; local sees 20 of the prompt.
    assert summary["attended"]["global"] == sum(range(101, 107)) + 117 == 738
    assert summary["attended"]["local"] == sum(range(27, 37)) == 315
    assert summary["attended_vanilla"] == sum(range(101, 118)) == 1853
    assert summary["reduction"] == 1 - 1053 / 1853
    # Local: pages 0, 5 and 6, and from position 112 on page 7.
    assert summary["read"]["local"] == (6 * 3 + 4 * 4) * 16
    assert summary["read"]["global"] == (6 * 7 + 8) * 16
    assert summary["finish_reason"] is None and not found.recorded.exact
    assert found.trace == (
        ("global", 6, 621, 672), ("local", 10, 315, 544), ("global", 1, 117, 128)
    )  # fmt: skip
    sums = replay.sums([found, found])
    assert sums["da"]["attended"]["total"] == 2 * 1053
    assert sums["da"]["reduction"] == 1 - 1053 / 1853
    assert (sums["da"]["tokenized_anew"], sums["da"]["mean_score"]) == (2, 0.5)
    assert sums["da"]["focus"]["success_rate"] is None


def test_sums_are_apart_for_each_arm(random_llm, tmp_path):
    entries = [NUMBERS, {**NUMBERS, "arm": "vanilla"}, {**NUMBERS, "score": 1}]
    walk = replayer(random_llm)
    found = [walk.replay(one) for one in read(tmp_path, *entries, arm=Arm.UNMASKED)]
    sums = replay.sums(found)
    assert {arm: account["responses"] for arm, account in sums.items()} == {
        "unmasked": 2, "vanilla": 1
    }  # fmt: skip
    assert sums["unmasked"]["mean_score"] == 1 and sums["vanilla"]["mean_score"] is None


@pytest.mark.parametrize(
    ("template", "style"),
    [
        (fixtures.CHATML, PLAIN),
        (fixtures.CHATML, COMPACT),
        (fixtures.CHATML, Style(**tiny.STYLE)),
        (fixtures.TRIMMING, PLAIN),
        (fixtures.TOOLS_IN_TURNS, TOOL),
        (fixtures.TOOLS_IN_TURNS, PLAIN),
    ],
)
@pytest.mark.parametrize("count", [1, 2, 11])
def test_chunks_of_a_rendered_prompt_are_found(template, style, count):
    writer = PromptRenderer(fixtures.make("byte_level", template), style)
    labelled = [
        Chunk(f"text {i}\n\nof é {i}", f"file {i}: a.py" if i % 2 else None) for i in range(count)
    ]
    prompt = writer.render(labelled, "Who?", system="Be kind.", history=())
    found = writer.read(prompt.text)
    assert found.ids.tolist() == prompt.ids.tolist()
    for name in ("chunks", "scaffold", "chunk_chars", "numbers", "text"):
        assert getattr(found, name) == getattr(prompt, name)
    if style.label and "{label}" in style.chunk:
        assert found.chunk_texts == prompt.chunk_texts


def test_a_question_in_other_words_leaves_the_tool_responses_to_tell_the_end():
    writer = PromptRenderer(fixtures.make("byte_level", fixtures.TOOLS_IN_TURNS), TOOL)
    prompt = writer.render(["one", "two"], "Who?")
    head, tail = prompt.text.rsplit("# Question\n", 1)
    other = head + "Answer this: " + tail
    assert writer.read(other).chunk_chars == prompt.chunk_chars


def test_a_vanilla_prompt_has_no_chunks():
    writer = PromptRenderer(fixtures.make("byte_level", fixtures.CHATML), PLAIN)
    prompt = writer.render("Magic Chunk 4\n", "Who?", arm="vanilla")
    found = writer.read(prompt.text, "vanilla")
    assert not found.chunks and found.scaffold == prompt.scaffold


TEXT = "S\n\nMagic Chunk 1\na\n\nMagic Chunk 2\nb\n\n# Question\nWho?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no chunk at all", "no header of a chunk is in the prompt; style 'plain' writes"),
        (TEXT.replace("Chunk 2", "Chunk 3"), "numbers 1, 3, where 1 to N must"),
        (TEXT.replace("a\n", "Magic Chunk 7\n"), "numbers 1, 7, 2, where"),
        (TEXT.replace("a\n\n", "a; "), "before the header of chunk 2 stands .*; '"),
        (TEXT.replace("# Question", "Asked"), "end of the last chunk .* is 0 times"),
        (TEXT + "\n\n# Question\nAgain?", "end of the last chunk .* is 2 times"),
    ],
)
def test_a_prompt_whose_chunks_cannot_be_found_is_refused(text, message):
    writer = PromptRenderer(fixtures.make("byte_level", fixtures.CHATML), PLAIN)
    assert len(writer.read(TEXT).chunks) == 2
    with pytest.raises(ValueError, match=message):
        writer.read(text)


def test_headers_that_the_template_escapes_are_refused():
    writer = PromptRenderer(fixtures.make("byte_level", fixtures.TOOLS_IN_ONE_TURN), TOOL)
    with pytest.raises(ValueError, match="no header of a chunk"):
        writer.read(writer.render(["one", "two"], "Who?").text)
    with pytest.raises(ValueError, match="changes the headers of style 'tool'"):
        writer.read("Magic Chunk 1\nx")


def test_what_cannot_be_replayed_is_named_with_its_line(random_llm, tmp_path):
    (one,) = read(tmp_path, {"prompt": "x", "response": "r"})
    with pytest.raises(ValueError, match=r"responses.jsonl, line 1: no header of a chunk"):
        replayer(random_llm).replay(one)


def test_chunks_of_every_form_are_those_of_the_conversation(random_llm, tmp_path):
    early, late = {"text": "one", "label": "a.py"}, "two"
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "first?", "chunks": [early]},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "second?", "chunks": [late]},
    ]
    own = [{**messages[1], "chunks": [Chunk("one", "a.py")]}, messages[2]]
    forced = random_llm.tokenizer.encode('<focus magic_chunks="3">x<local>y')
    response = random_llm.generate(
        ["zero"], "second?", system="Be kind.", history=own, chunks=["two"], forced=forced,
        max_tokens=len(forced),
    )  # fmt: skip
    (one,) = read(tmp_path, recorded(response, messages=messages, documents=["zero"]))
    assert replayer(random_llm).replay(one).summary == response.summary
    assert response.summary["attended"]["focus"] > 0


def command(*arguments):
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


def test_the_command_prints_lines_and_sums(tiny_folder, random_llm, tmp_path):
    read(tmp_path, NUMBERS, {**NUMBERS, "score": 1})
    path, model = tmp_path / "responses.jsonl", ("--model", tiny_folder, "--style", "plain")
    done = command(*model, path, path, "--page-size", 16)
    assert done.exit_code == 0
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    expected = replayer(random_llm).replay(recorded_lib.read(path)[0])
    assert [line["summary"] for line in lines] == [expected.summary] * 4
    assert lines[1]["source"] == f"{path}, line 2" and lines[1]["tokens"] == "tokenized anew"
    for shown in (
        "attended in local",
        "1,260",
        "read, pages of 16",
        "43.2%",
        "mean score",
        "4 of 4 responses came",
    ):
        assert shown in done.stderr
    done = command(*model, path, "--page-size", 16, "--json")
    sums = json.loads(done.stdout)
    assert sums["arms"] == json.loads(json.dumps(replay.sums([expected, expected]))) | {
        "da": sums["arms"]["da"]
    }
    assert sums["arms"]["da"]["read"]["local"] == 2 * 544 and not done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scaffold", "none"], "--scaffold is 'none'; choose one of all, paper"),
        (["--answer-mode", "x"], "--answer-mode is 'x'; choose one of local, keep, global"),
        (["--initial", "focus"], "the initial mode is 'focus'"),
        (["--page-size", "0"], "page_size is 0"),
        (["--arm", "dense"], "arm is 'dense'"),
        (["--initial", "focus:9"], "line 1: initial"),
    ],
)
def test_the_command_refuses_before_it_prints(tmp_path, arguments, message):
    read(tmp_path, NUMBERS)
    done = command(tmp_path / "responses.jsonl", *arguments)
    assert isinstance(done.exception, ValueError) and message in str(done.exception)
    assert not done.stdout


def test_no_backend_starts(tmp_path):
    read(tmp_path, {"document": "a=b.", "question": "a?", "response": "<local>x"})
    code = (
        "import sys\n"
        "from da_jax.cli.main import app\n"
        "try: app(['replay', sys.argv[1], '--json'])\n"
        "except SystemExit: pass\n"
        "import jax\n"
        "print(jax._src.xla_bridge.backends_are_initialized())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "responses.jsonl")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    sums, started = done.stdout.splitlines()
    assert started == "False" and json.loads(sums)["arms"]["da"]["responses"] == 1
