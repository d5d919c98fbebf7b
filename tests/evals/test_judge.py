import http.server
import json
import threading
import time

import pytest

from da_jax.evals import judge as judge_lib
from da_jax.evals.judge import Judge, JudgeError, parse_verdict

KEY = "sk-very-secret"
RIGHT = '{"reason": "same", "correct": true}'
WRONG = '{"reason": "other", "correct": false}'


def completion(text):
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}, {}


@pytest.fixture
def endpoint(monkeypatch):
    """A server that gives its `replies` in order; `seen` holds what it was asked."""
    replies, seen = [], []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, self.headers.get("Authorization"), body))
            status, reply, headers = replies.pop(0)
            data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("A_KEY", KEY)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server.replies, server.seen = replies, seen
    server.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def make(endpoint):
    waits = []

    def build(**options):
        judge = Judge("m", endpoint.url, key_env="A_KEY", sleep=waits.append, **options)
        object.__setattr__(judge, "waits", waits)
        return judge

    return build


def test_a_verdict_is_asked_with_question_reference_and_response(endpoint, make):
    endpoint.replies += [completion(RIGHT), completion(WRONG)]
    judge = make()
    score = judge.score("who?", "Ada", "It was {Ada}.")
    assert score.value == 1 and score.details["reason"] == "same"
    assert judge.score("who?", "Ada", "Bob").value == 0
    path, authorization, body = endpoint.seen[0]
    assert path == "/v1/chat/completions" and authorization == f"Bearer {KEY}"
    assert body["temperature"] == 0 and body["model"] == "m"
    prompt = body["messages"][0]["content"]
    assert all(text in prompt for text in ("who?", "Ada", "It was {Ada}.", '{"reason"'))


def test_a_score_says_who_judged_and_never_holds_the_key(endpoint, make):
    endpoint.replies.append(completion(RIGHT))
    judge = make()
    score = judge.score("q", "r", "a")
    who = score.details["judge"]
    assert who["model"] == "m" and who["url"] == endpoint.url
    assert (who["max_tokens"], who["temperature"]) == (1024, 0)
    assert len(who["prompt_sha256"]) == 16
    assert KEY not in json.dumps(score.details) + repr(judge)


def test_an_empty_answer_is_wrong_without_asking(endpoint, make):
    assert make().score("q", "r", " \n").value == 0
    assert not endpoint.seen


def test_a_verdict_is_asked_once_for_each_prompt(endpoint, make, tmp_path):
    endpoint.replies += [completion(RIGHT), completion(WRONG)]
    assert make(cache=tmp_path / "c").verdict("q", "r", "a").correct
    assert make(cache=tmp_path / "c").verdict("q", "r", "a").correct
    assert not make(cache=tmp_path / "c").verdict("q", "r", "b").correct
    assert len(endpoint.seen) == 2
    kept = [path.read_text() for path in (tmp_path / "c").iterdir()]
    assert len(kept) == 2 and all(KEY not in text for text in kept)


def test_busy_endpoints_are_asked_again_after_a_while(endpoint, make):
    endpoint.replies += [
        (429, {"error": "slow down"}, {"Retry-After": "7"}),
        (503, b"down", {}),
        (200, b"{half a reply", {}),
        (200, {"error": "odd"}, {}),
        completion("It is correct, I think."),
        completion(f"<think>{WRONG}?</think>```json\n{RIGHT}\n```"),
    ]
    judge = make(backoff=1.0)
    assert judge.verdict("q", "r", "a").correct
    assert judge.waits == [7, 2, 4, 8, 16]


def test_no_verdict_is_an_error_and_not_a_zero(endpoint, make, tmp_path):
    endpoint.replies += [completion('{"correct": "yes"}')] * 3
    with pytest.raises(JudgeError, match=r"no verdict in 3 attempts.*\"yes\""):
        make(attempts=3, cache=tmp_path / "c").score("q", "r", "a")
    assert not (tmp_path / "c").exists()


def test_a_refusal_is_not_asked_again_and_does_not_show_the_key(endpoint, make):
    endpoint.replies.append((401, {"error": f"bad key {KEY}"}, {}))
    with pytest.raises(JudgeError, match=r"answers 401; set \$A_KEY") as error:
        make().verdict("q", "r", "a")
    assert KEY not in str(error.value) and len(endpoint.seen) == 1


def test_a_key_from_a_file_loses_its_newline_and_no_error_shows_a_key(endpoint, make, monkeypatch):
    monkeypatch.setenv("A_KEY", f"{KEY}\r\n")
    endpoint.replies.append(completion(RIGHT))
    assert make().verdict("q", "r", "a").correct
    assert endpoint.seen[-1][1] == f"Bearer {KEY}"
    monkeypatch.setenv("A_KEY", f"{KEY}\nInjected: yes")
    with pytest.raises(JudgeError, match=r"\$A_KEY holds characters") as caught:
        make().verdict("q", "r", "b")
    assert KEY not in str(caught.value)


def test_the_key_is_not_taken_to_another_host(endpoint, make):
    endpoint.replies.append((302, b"", {"Location": endpoint.url + "/elsewhere"}))
    with pytest.raises(JudgeError, match="answers 302"):
        make().verdict("q", "r", "a")
    assert len(endpoint.seen) == 1


def test_a_dead_endpoint_is_an_error_after_all_attempts():
    judge = Judge("m", "http://127.0.0.1:9/v1", attempts=2, sleep=lambda seconds: None)
    with pytest.raises(JudgeError, match="no verdict in 2 attempts"):
        judge.verdict("q", "r", "a")


@pytest.mark.parametrize("reply", ["", "true", "[]", '{"correct": 1}', '{"reason": "x"}', "{x}"])
def test_what_is_no_verdict_is_refused(reply):
    with pytest.raises(ValueError, match="no verdict"):
        parse_verdict(reply)


@pytest.mark.parametrize(
    "other",
    [
        {"model": "n"}, {"url": "https://api.openai.com/v2"}, {"max_tokens": None},
        {"max_tokens": 64}, {"temperature": None}, {"temperature": 0.5},
    ],
)  # fmt: skip
def test_how_a_judge_is_asked_is_part_of_who_it_is(other):
    assert Judge(**{"model": "m"} | other).identity != Judge("m").identity
    assert Judge("m", "https://api.openai.com/v1/").identity == Judge("m").identity


def test_what_an_endpoint_refuses_can_be_left_out(endpoint, make):
    endpoint.replies += [
        (400, {"error": "'max_tokens' is not supported; 'temperature' does not support 0"}, {}),
        (400, {"error": "'temperature' does not support 0"}, {}),
        completion(RIGHT),
    ]
    with pytest.raises(JudgeError, match=r"--judge-max-tokens none.*--judge-temperature none"):
        make().verdict("q", "r", "a")
    with pytest.raises(JudgeError, match=r"takes no temperature") as error:
        make(max_tokens=None).verdict("q", "r", "a")
    assert "--judge-max-tokens" not in str(error.value)
    assert make(max_tokens=None, temperature=None).verdict("q", "r", "a").correct
    sent = [body.keys() & {"max_tokens", "temperature"} for _, _, body in endpoint.seen]
    assert sent == [{"max_tokens", "temperature"}, {"temperature"}, set()]


def test_a_reply_that_is_cut_off_says_how_to_get_a_longer_one(endpoint, make):
    status, reply, headers = completion("<think>Well, the")
    reply["choices"][0]["finish_reason"] = "length"
    endpoint.replies.append((status, reply, headers))
    with pytest.raises(JudgeError, match=r"cut off at 64 tokens, raise --judge-max-tokens"):
        make(attempts=1, max_tokens=64).verdict("q", "r", "a")


def test_a_judge_that_is_stopped_waits_no_more(endpoint):
    endpoint.replies += [(503, b"down", {"Retry-After": "60"})]
    judge = Judge("m", endpoint.url, key_env="A_KEY")
    failed = []

    def ask():
        with pytest.raises(JudgeError, match="was stopped") as error:
            judge.verdict("q", "r", "a")
        failed.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    while not endpoint.seen:
        time.sleep(0.01)
    judge.stop()
    thread.join(10)
    assert failed and len(endpoint.seen) == 1


def test_another_prompt_is_another_judge(monkeypatch):
    before = Judge("m").identity
    monkeypatch.setattr(judge_lib, "PROMPT", "Other words: {question} {reference} {response}")
    assert Judge("m").identity["prompt_sha256"] != before["prompt_sha256"]


@pytest.mark.parametrize(
    "url",
    ["ftp://x/v1", "localhost:8000", "https://user:word@x/v1", "https://x/v1?key=word"],
)
def test_a_bad_address_is_refused_without_repeating_it(url):
    with pytest.raises(ValueError, match="judge's url") as error:
        Judge("m", url)
    assert "word" not in str(error.value).replace("password", "")


@pytest.mark.parametrize("bad", [{"attempts": 0}, {"max_tokens": 0}, {"temperature": -1.0}])
def test_numbers_of_a_judge_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=f"the judge's {next(iter(bad))} is"):
        Judge("m", **bad)
