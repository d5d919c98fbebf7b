"""Conversations whose later questions bring chunks of their own."""

import itertools

import pytest

from da_jax import Chunk, Done, RequestError

OPTIONS = dict(max_tokens=6, ignore_eos=True)


@pytest.fixture
def prompts(random_llm, monkeypatch):
    """The prompts that were rendered."""
    made, render = [], random_llm.renderer.render

    def spy(*arguments, **options):
        made.append(render(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(random_llm.renderer, "render", spy)
    return made


def test_each_prompt_begins_with_the_one_before_up_to_its_question(random_llm, prompts):
    conversation = random_llm.conversation(["one", "two"], system="Be brief.", **OPTIONS)
    for number, chunks in enumerate((["three"], [], ["four", "five"], ["six"])):
        conversation.add(chunks)
        conversation.ask(f"question {number}?")
    for number, (prompt, later) in enumerate(itertools.pairwise(prompts)):
        before = prompt.text[: prompt.text.index(f"Q: question {number}?")]
        border = len(random_llm.tokenizer.encode(before))
        assert prompt.ids[:border].tolist() == later.ids[:border].tolist()
        assert later.chunks[: len(prompt.chunks)] == prompt.chunks
        assert prompt.chunks[-1][1] <= border
    assert [prompt.numbers[-1] for prompt in prompts] == [3, 3, 5, 6]
    own = [prompts[-1].text[a:b] for a, b in prompts[-1].chunk_chars]
    assert own[2:] == ["[3] three", "[4] four\n", "[5] five", "[6] six"]


def test_it_is_the_chat_of_its_history(random_llm):
    conversation = random_llm.conversation(["one"], system="Be brief.", **OPTIONS)
    conversation.add(["two"])
    first = conversation.ask("a?", forced="<local>x</local>", max_tokens=20)
    assert conversation.history == [
        {"role": "user", "content": "a?", "chunks": ("two",)},
        {"role": "assistant", "content": first.text},
    ]
    assert first.text.startswith("<local>x</local>")
    conversation.add([Chunk("three", "c.txt")])
    question = {"role": "user", "content": "b?", "chunks": [Chunk("three", "c.txt")]}
    system = {"role": "system", "content": "Be brief."}
    messages = [system, *conversation.history, question]
    expected = random_llm.chat(messages, documents=["one"], **OPTIONS)
    assert conversation.ask("b?").token_ids == expected.token_ids
    assert [turn["role"] for turn in conversation.history] == ["user", "assistant"] * 2


def test_later_chunks_are_declared_by_their_numbers(random_llm, prompts):
    conversation = random_llm.conversation([Chunk("one", id=40)], **OPTIONS)
    conversation.ask("a?")
    conversation.add([Chunk("two", id=7)])
    response = conversation.ask("b?", visible=(7,))
    ((start, end),) = (prompts[-1].chunks[i] for i, n in enumerate(prompts[-1].numbers) if n == 40)
    assert {step.vanilla - step.attended for step in response.steps} == {end - start}
    conversation.add(["three"])
    with pytest.raises(ValueError, match="chunk 3 has no id, but chunk 1 has 40"):
        conversation.ask("c?")
    assert len(conversation.history) == 4


def test_tags_of_earlier_answers_do_not_act(random_llm):
    conversation = random_llm.conversation(["one", "two"], **OPTIONS)
    conversation.ask("a?", forced="<local>x", max_tokens=9)
    response = conversation.ask("b?", forced="yy")
    assert response.steps[0].attended == response.steps[0].vanilla


def test_a_question_that_is_not_answered_leaves_no_trace(random_llm, prompts):
    conversation = random_llm.conversation(**OPTIONS)
    conversation.add(["one"])
    with pytest.raises(RequestError, match="max_model_len is 512"):
        conversation.ask("x" * 600)
    stream = conversation.stream("a?")
    next(stream)
    stream.close()
    assert conversation.history == [] and random_llm.engine.idle
    *_, done = conversation.stream("b?")
    assert isinstance(done, Done)
    assert [turn["content"] for turn in conversation.history] == ["b?", done.response.text]
    assert conversation.history[0]["chunks"] == ("one",)
    conversation.ask("c?")
    assert prompts[-1].numbers == (1,)  # the chunk came once


def test_a_text_is_cut_and_chunks_added_meanwhile_wait(random_llm, prompts):
    conversation = random_llm.conversation(**OPTIONS)
    conversation.add("word " * 30)
    stream = conversation.stream("a?")
    next(stream)
    conversation.add(["later"])
    list(stream)
    assert conversation.history[0]["chunks"] == ("word " * 30,)
    conversation.ask("b?")
    assert "later" in prompts[-1].chunk_texts and "later" not in prompts[0].chunk_texts
    assert prompts[-1].numbers == (1, 2)


def test_a_question_waits_for_the_answer_before_it(random_llm, prompts):
    conversation = random_llm.conversation(**OPTIONS)
    conversation.add(["one"])
    stream = conversation.stream("a?")
    for _ in range(2):  # before it starts, and while it runs
        with pytest.raises(RuntimeError, match=r"'b\?' needs the answer before it.*or close it"):
            conversation.stream("b?")
        with pytest.raises(RuntimeError, match=r"'c\?' needs the answer"):
            conversation.ask("c?")
        next(stream)
    assert len(prompts) == 1 and conversation.history == []
    while not isinstance(next(stream), Done):
        pass
    conversation.add(["two"])
    conversation.ask("b?")  # though nobody closed the stream
    assert [turn["content"] for turn in conversation.history[::2]] == ["a?", "b?"]
    assert [turn["chunks"] for turn in conversation.history[::2]] == [("one",), ("two",)]
    assert prompts[-1].numbers == (1, 2)


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("end", ["close", "drop"])
def test_a_stream_that_is_closed_or_dropped_makes_way(random_llm, started, end):
    conversation = random_llm.conversation(["one"], **OPTIONS)
    stream = conversation.stream("a?")
    if started:
        next(stream)
    if end == "close":
        stream.close()
    else:
        del stream
    conversation.ask("b?")
    assert [turn["content"] for turn in conversation.history[::2]] == ["b?"]
    assert random_llm.engine.idle


def test_the_history_is_a_copy(random_llm):
    conversation = random_llm.conversation(["one"], **OPTIONS)
    conversation.ask("a?")
    conversation.history[0]["content"] = "changed"
    conversation.history.clear()
    assert conversation.history[0]["content"] == "a?"
